"""The optimiser loop: batches, updates, checkpoints and resumable runs."""
