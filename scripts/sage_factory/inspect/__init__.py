"""Inspecting: what a file says of itself, what is wrong with it, where two differ."""
