"""With what: environments, locks, compilers, the channel that packages are built from."""
