"""`treering serve`: serve a model or a checkpoint over HTTP."""
