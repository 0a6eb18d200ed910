"""Run the RL loop in several processes, on one machine or many: rollout workers, a reward worker and a trainer."""
