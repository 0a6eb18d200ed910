"""Decoding and drafting speed of the embedded engine."""
