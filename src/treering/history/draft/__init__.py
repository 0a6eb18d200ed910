"""The drafter: candidates, acceptance estimates and draft trees."""
