"""Train on environments of verifiers v1, which run in their own interpreter."""

from treering.integrations.verifiers.verifiers_environment import VerifiersEnvironment

__all__ = ["VerifiersEnvironment"]
