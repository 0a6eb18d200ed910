"""Predicts rollout lengths, and measures the quality of predictions."""
