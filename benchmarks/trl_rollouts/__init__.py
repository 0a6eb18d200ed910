"""Rollouts of TRL's trainer from the embedded engine, with drafts where they pay and without."""
