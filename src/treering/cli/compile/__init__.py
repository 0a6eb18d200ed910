"""`treering compile`: all functions of numba, ahead of their first use."""
