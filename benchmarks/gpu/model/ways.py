"""All ways that are compared: a layout of sequences, layers as people run them, and a head."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from transformers import PreTrainedModel

from benchmarks.common.timing import Step
from benchmarks.gpu.data import Workload
from benchmarks.gpu.model.steps import Head, MicroBatch, Rows, build_step
from treering.model.layers import Layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        rows: how sequences are laid out.
        layers: stock code, compiled layer by layer, or with Liger's kernels for norms, rotations and gates.
        head: of the stock layouts; Treering's have their own.
    """

    rows: Rows
    layers: Layers
    head: Head = "chunks"

    @property
    def is_tree(self) -> bool:
        """Whether it shares; all others are baselines."""
        return self.rows == "tree"

    def step(self, model: PreTrainedModel, workload: Workload, max_tokens: MicroBatch) -> Step:
        """One forward and backward of the workload, on a model whose layers are prepared."""
        return build_step(self.rows, self.head, model, workload, max_tokens)


def all_ways() -> Mapping[str, Way]:
    """The ways by name: those that are likely to be fastest first, so that slow ones are known when they come.

    Example: "padded, liger, liger head" is what TRL runs with `use_liger_kernel`.
    """
    layers: tuple[Layers, ...] = ("liger", "compiled", "stock")
    rows: tuple[Rows, ...] = ("tree", "padded", "varlen", "chains")
    ways = {f"{some}, {kind}": Way(rows=some, layers=kind) for kind, some in product(layers, rows)}
    fused = {f"{some}, liger, liger head": Way(rows=some, layers="liger", head="liger") for some in rows[1:3]}
    return MappingProxyType(ways | fused)
