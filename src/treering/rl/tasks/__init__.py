"""Tasks: prompts, observations and rewards."""
