"""Hugging Face models on forests: route their attention, score edges, refuse what would not be exact."""
