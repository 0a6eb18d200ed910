"""Prefix forests of token sequences: build, plan, stats. Numpy and numba only, no torch."""
