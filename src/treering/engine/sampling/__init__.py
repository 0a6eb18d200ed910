"""Sample from logits by Gumbel-max with keyed noise, and verify drafts."""
