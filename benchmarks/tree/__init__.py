"""Tree training against flat training."""
