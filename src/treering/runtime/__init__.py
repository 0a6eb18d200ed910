"""The runtime: a loop whose rollout workers, rewards and training are processes of one machine."""
