"""What is built: the table of versions and what follows from it."""
