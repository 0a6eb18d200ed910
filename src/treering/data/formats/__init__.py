"""Trajectory files: readers, writers, and the JSON format of a trajectory."""
