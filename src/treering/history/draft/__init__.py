"""Drafter: candidates, acceptance estimates and draft trees."""
