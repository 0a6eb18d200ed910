"""Engines: sample rollouts of a policy through one protocol."""
