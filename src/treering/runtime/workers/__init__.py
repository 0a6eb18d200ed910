"""The code of the child processes."""
