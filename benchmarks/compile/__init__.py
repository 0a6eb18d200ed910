"""What numba compiles on a new installation."""
