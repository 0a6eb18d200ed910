"""Trajectory files as token arrays on disk, built in one pass and cached for the next start."""
