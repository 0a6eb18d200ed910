"""Slots of keys and values: who owns which, and prompts that rollouts share."""
