"""Trajectories to token ids and loss masks."""
