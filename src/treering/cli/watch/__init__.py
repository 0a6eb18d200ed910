"""`treering watch`: the panel of a run elsewhere."""
