"""Hugging Face models on forests: routing their attention, scoring edges, refusing what would be wrong."""

from treering.model.context import TreeContext, tree_attention
from treering.model.forward import ForwardOutput, forward

__all__ = ["ForwardOutput", "TreeContext", "forward", "tree_attention"]
