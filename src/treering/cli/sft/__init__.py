"""`treering sft`: supervised training on trajectories."""
