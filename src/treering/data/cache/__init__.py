"""Trajectory files as arrays of tokens on disk, made in one pass and kept for the next start."""
