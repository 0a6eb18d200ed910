"""`treering serve`: a model over HTTP."""
