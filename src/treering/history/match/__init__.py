"""Searches for a row's context in history, in running rollouts and in other prompts."""
