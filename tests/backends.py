from treering.attention import Backend

EXACT_BACKENDS: tuple[Backend, ...] = ("segments", "reference")
"""Backends that compute in float64, forward and backward. Kernels of other devices have their own tests."""
