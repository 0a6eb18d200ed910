"""How functions are compiled by numba: once for all processes of a machine, and quickly."""
