"""Tree attention: one function, several backends, all defined by `subtree_end` alone.

`reference` is the specification; every other backend is tested against it and against separate flat sequences.
"""

from treering.attention.dispatch import BACKENDS, AttentionShape, Backend, attend, choose_backend
from treering.attention.layout import ScoreOptions, TreeLayout

__all__ = ["BACKENDS", "AttentionShape", "Backend", "ScoreOptions", "TreeLayout", "attend", "choose_backend"]
