"""A teacher on a forest: its scores, and divergences from it through both heads in chunks."""
