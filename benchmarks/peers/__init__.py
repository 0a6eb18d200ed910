"""Arctic's suffix decoding, in its own environment."""
