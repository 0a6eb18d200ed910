"""Which attention backends the tests of whole models run on a CPU."""

from treering.attention import Backend

EXACT_BACKENDS: tuple[Backend, ...] = ("segments", "reference")
"""Those that compute in float64, forward and backward. The kernels of other devices have tests of their own."""
