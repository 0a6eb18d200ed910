"""Treering inside other projects: each package imports its host on first use, and no host type leaves it."""
