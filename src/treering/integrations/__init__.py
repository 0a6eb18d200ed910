"""Treering inside other projects: each package here imports its host on first use, and its types stop here."""
