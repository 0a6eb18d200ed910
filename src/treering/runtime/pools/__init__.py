"""The controller's clients of the rollout workers, the reward worker and the trainer."""
