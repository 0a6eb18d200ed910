"""The RL loop in several processes on one machine: rollout workers, a reward worker and a trainer."""
