"""The drafters that are replayed: ours, Arctic's, and published baselines."""
