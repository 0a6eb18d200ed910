"""Reinforcement learning: tasks and rewards, advantages, and the loop that joins engine and trainer."""
