"""Trains on environments of verifiers v1, which run in an interpreter of their own."""

from treering.integrations.verifiers.environment import VerifiersEnvironment

__all__ = ["VerifiersEnvironment"]
