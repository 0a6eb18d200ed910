"""`treering serve`: a model behind HTTP."""
