"""Hugging Face models on forests: routing their attention, scoring edges, refusing what would be wrong."""
