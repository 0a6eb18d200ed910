"""Records of other tools as trajectories, a format per file."""
