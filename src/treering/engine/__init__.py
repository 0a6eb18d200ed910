"""Sample rollouts of a policy through one protocol."""
