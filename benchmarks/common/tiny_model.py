"""A model from random weights that costs nothing, for runs whose model does not matter."""

TINY_MODEL = """
hidden_size = 32
num_layers = 1
"""
"""The section `[model]` of a configuration, without its head."""
