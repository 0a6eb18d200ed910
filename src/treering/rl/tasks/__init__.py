"""Tasks: prompts and rewards."""
