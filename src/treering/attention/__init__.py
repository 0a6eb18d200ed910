"""Tree attention: one function, several backends, all defined by `subtree_end` alone.

`reference` is the specification; every other backend is tested against it and against separate flat sequences.
"""

from treering.attention.api import attend
from treering.attention.form import Form
from treering.attention.layout import TreeLayout
from treering.attention.rules import BACKENDS, Backend, choose_backend

__all__ = ["BACKENDS", "Backend", "Form", "TreeLayout", "attend", "choose_backend"]
