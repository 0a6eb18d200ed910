"""Tinker's protocol: clients train and sample their own models in sessions."""
