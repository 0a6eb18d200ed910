"""Compile functions by numba: once for all processes of a machine, and quickly."""
