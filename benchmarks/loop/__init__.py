"""Steps of the whole loop, and learning curves."""
