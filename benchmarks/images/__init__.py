"""Training on images that branches share, against stock padded batches."""
