"""`treering init`: a configuration for the user's own data and model."""
