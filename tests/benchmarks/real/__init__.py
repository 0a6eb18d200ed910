"""The benchmark of a pretrained model."""
