"""The attention backends that tests of whole models run on a CPU."""

from treering.attention import Backend

EXACT_BACKENDS: tuple[Backend, ...] = ("segments", "reference")
"""Backends that compute in float64, forward and backward. Kernels of other devices have other tests."""
