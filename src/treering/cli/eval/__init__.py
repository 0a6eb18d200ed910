"""`treering eval`: a checkpoint or model on held-out data."""
