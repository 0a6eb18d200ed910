"""Keyed noise, Gumbel-max sampling from logits, and verification of drafts."""
