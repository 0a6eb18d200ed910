"""Arctic's suffix decoding, in an environment of its own."""
