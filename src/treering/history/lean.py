"""Compiled functions that make no arrays: numba counts no references in them.

numba counts references to every array that a function takes out of a tuple or hands on, with atomic operations; in
loops of a few nanoseconds that is most of the time. A signed index it looks at for whether it counts from the end,
unless that is a loop's own; so numbers that were read from arrays index as `np.uintp` where much time goes. Knows
nothing of what functions do.
"""

from numba import njit

lean = njit(_nrt=False, forceinline=True, error_model="numpy")
"""`numba.njit` for functions that are called by compiled ones and make no arrays; those that do fail to compile.

Divisors are looked at by those who divide: a division by zero raises nothing."""
