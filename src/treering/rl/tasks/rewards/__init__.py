"""Rewards on the text of a response: ready ones, functions of your own, and weighted sums of them."""
