"""Tree attention: one function, several backends, all defined by `subtree_end` alone.

`reference` is the specification; every other backend is tested against it and against separate flat sequences.
"""

from treering.attention.api import BACKENDS, Backend, attend, choose_backend
from treering.attention.layout import TreeLayout

__all__ = ["BACKENDS", "Backend", "TreeLayout", "attend", "choose_backend"]
