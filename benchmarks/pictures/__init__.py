"""Training on pictures that branches share, against stock padded batches."""
