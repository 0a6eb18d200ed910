"""Memory of a step: what it takes, what becomes of activations, and how many tokens fit."""
