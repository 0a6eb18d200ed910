"""Trajectory files: readers, writers, and the JSON form of a trajectory."""
