"""Reinforcement learning: tasks, rewards, advantages, and the loop over engine and trainer."""
