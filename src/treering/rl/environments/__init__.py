"""Environments of agents: episodes ask for calls, and what they sampled is trained as trees."""
