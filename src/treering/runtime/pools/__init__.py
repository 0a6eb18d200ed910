"""The controller's side of rollout workers, reward workers and the trainer."""
