"""Environments of agents: episodes request model calls, and the sampled tokens are trained as trees."""

from treering.errors import ContextFullError
from treering.rl.environments.environment import Environment, EnvTask, Outcome
from treering.rl.environments.library_tools import StepEnvironment, ToolEnvironment
from treering.rl.environments.policy_calls import Policy, Reply, Sampled

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
