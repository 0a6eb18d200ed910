"""Environments of agents: episodes ask for calls, and what they sampled is trained as trees."""

from treering.errors import ContextFullError
from treering.rl.environments.adapters import StepEnvironment, ToolEnvironment
from treering.rl.environments.environment import Environment, EnvTask, Outcome
from treering.rl.environments.policy import Policy, Reply, Sampled

__all__ = [
    "ContextFullError",
    "EnvTask",
    "Environment",
    "Outcome",
    "Policy",
    "Reply",
    "Sampled",
    "StepEnvironment",
    "ToolEnvironment",
]
