"""Keyed noise, sampling from logits, and verification of drafts."""
