"""Sinks that send a run's metrics to a tracker: Weights & Biases, Trackio, MLflow. Each is an extra. No torch."""
