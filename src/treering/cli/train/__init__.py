"""`treering train`: reinforcement learning from a configuration."""
