"""`treering eval`: held-out data, measured."""
