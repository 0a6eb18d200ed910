"""Trajectory files: reading, writing, and the JSON form of a trajectory."""
