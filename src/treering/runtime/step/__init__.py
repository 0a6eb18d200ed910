"""One step while it is sampled: its plan, its rollouts and their migration."""
