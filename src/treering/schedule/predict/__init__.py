"""How long rollouts will become, and how good such predictions were."""
