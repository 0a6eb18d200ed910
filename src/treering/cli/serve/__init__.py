"""`treering serve`: a model or a checkpoint over HTTP."""
