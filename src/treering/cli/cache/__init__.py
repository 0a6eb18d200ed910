"""`treering cache`: what is kept of trajectory files for the next start."""
