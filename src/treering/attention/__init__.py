"""Tree attention: one function, several backends, all defined by `subtree_end` alone.

`reference` is the specification; every other backend is tested against it and against separate flat sequences.
"""

from treering.attention.api import attend
from treering.attention.backends import BACKENDS, Backend
from treering.attention.form import Form
from treering.attention.layout import TreeLayout
from treering.attention.rules import choose_backend
from treering.attention.self_check import AttentionShape

__all__ = ["BACKENDS", "AttentionShape", "Backend", "Form", "TreeLayout", "attend", "choose_backend"]
