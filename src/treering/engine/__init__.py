"""Engines: rollouts of a policy, behind one protocol."""
