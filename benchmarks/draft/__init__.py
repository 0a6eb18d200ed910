"""Drafting on recorded rollouts, against published drafters."""
