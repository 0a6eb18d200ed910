"""The optimizer loop: batches, updates, checkpoints and resumable runs."""
