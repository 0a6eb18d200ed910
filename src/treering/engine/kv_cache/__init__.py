"""Key-value memory: slot allocation and prompts shared by rollouts."""
