"""`treering eval`: measure a model on held-out data."""
