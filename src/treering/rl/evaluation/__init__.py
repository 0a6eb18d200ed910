"""Rewards of held-out prompts."""
