"""Models and workloads of the whole-model benchmark, and how they are built on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.gpu.data import Workload
from benchmarks.gpu.workloads import shared_prefix
from benchmarks.tree.cases import model_settings
from treering.model.layers import Layers, enable_gradient_checkpointing
from treering.tree.forest import Forest
from treering.tree.stats import Work, flat_work, train_flops, tree_work, work_bounds
from treering.types import NAMED_SHAPES, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A model to measure and how: the same for every way to train.

    Attributes:
        shape: its sizes.
        is_tied: whether the head is the embedding, as in the published model.
        checkpointed: whether layers are computed again in the backward, because their activations would not fit.
        token_options: sizes of a micro-batch in tokens, one of which is chosen for each way.
        workloads: what it trains; the options are chosen on the first one.
        layers: as people run them, in the order in which they are measured.
        dtype: of weights and activations.
        checked_length: tokens of the branches that gradients are compared on.
    """

    shape: ModelShape
    is_tied: bool
    checkpointed: bool
    token_options: tuple[int, ...]
    workloads: tuple[Workload, ...]
    layers: tuple[Layers, ...] = ("liger", "compiled", "stock")
    dtype: torch.dtype = torch.bfloat16
    checked_length: int = 512


def full_plans(sets: Sequence[Workload]) -> list[ModelPlan]:
    """The plans by importance: if time runs out, the last ones are missing. The large model has smaller workloads."""
    sharings = (0.0, 0.5, 0.9)
    small = ModelPlan(
        shape=NAMED_SHAPES["qwen3-1.7b"],
        is_tied=True,
        checkpointed=False,
        token_options=(8_192, 16_384),
        workloads=(*map(shared_prefix, sharings), *sets),
    )
    large = ModelPlan(
        shape=NAMED_SHAPES["qwen3-8b"],
        is_tied=False,
        checkpointed=True,
        token_options=(8_192, 16_384),
        workloads=(
            *(shared_prefix(sharing, num_branches=NUM_LARGE_BRANCHES) for sharing in (0.0, 0.5, 0.75)),
            *(shortened(workload, LARGE_TOKENS) for workload in sets[:1]),
        ),
        layers=("liger", "compiled"),
    )
    return [small, large]


NUM_LARGE_BRANCHES = 8
LARGE_TOKENS = 24_576
"""Flat tokens of a set for the large model, which takes five times as long for each."""


TINY_SHAPE = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=48,
    vocab_size=4096,
)


def tiny_plans(sets: Sequence[Workload]) -> list[ModelPlan]:
    """One tiny model on a sharing of 0.5, none, and a set."""
    sweep = [shared_prefix(sharing, length=24, num_branches=4) for sharing in (0.5, 0.0)]
    return [
        ModelPlan(
            shape=TINY_SHAPE,
            is_tied=False,
            checkpointed=True,
            token_options=(48, 128),
            workloads=(*sweep, *sets[:1]),
            layers=("stock",),
            dtype=torch.float32,
            checked_length=24,
        )
    ]


def shortened(workload: Workload, max_tokens: int) -> Workload:
    """The first trees of a workload of that many flat tokens at most, one tree at least.

    Example: of trees with 9, 4 and 5 flat tokens 13 takes two.
    """
    sizes = np.cumsum([sum(branch.size for branch in group) for group in workload.groups])
    groups = workload.groups[: max(1, int((sizes <= max_tokens).sum()))]
    return Workload(name=workload.name, groups=groups, masks=workload.masks[: sum(map(len, groups))])


def build_on_device(plan: ModelPlan, device: str) -> PreTrainedModel:
    """A Qwen3 with seeded random weights, drawn where they are used; training mode, SDPA attention."""
    config = Qwen3Config(**model_settings(plan.shape), tie_word_embeddings=plan.is_tied)
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=plan.dtype, attn_implementation="sdpa")
    enable_gradient_checkpointing(model, "non_reentrant" if plan.checkpointed else "none")
    return model.train()


def count(workload: Workload, shape: ModelShape) -> dict[str, float]:
    """Tokens, sharing, FLOPs and bounds.

    `flop_bound` counts the head for every token, as everywhere in Treering; `scored_flop_bound` counts it only on rows
    that carry loss, where it runs.

    Example: one tree of [5, 6, 7] and [5, 6, 8], all trained, has 6 flat tokens, 4 distinct ones and a token bound of
    1.5; its head runs on 4 rows of the branches and 2 of the tree.
    """
    forests = [Forest.from_sequences(group) for group in workload.groups]
    flat, tree = flat_work(np.array([branch.size for branch in workload.sequences])), tree_work(forests)
    bounds = work_bounds(flat, tree, shape)
    num_rows = num_scored_rows(forests, workload.masks)
    scored = [
        _scored_flops(shape, work, rows) for work, rows in ((flat, workload.num_trained_tokens), (tree, num_rows))
    ]
    return {
        "num_trees": len(forests),
        "num_branches": len(workload.sequences),
        "flat_tokens": flat.num_tokens,
        "unique_tokens": tree.num_tokens,
        "trained_tokens": workload.num_trained_tokens,
        "sharing": 1.0 - tree.num_tokens / flat.num_tokens,
        "token_bound": bounds.token_bound,
        "flop_bound": bounds.flop_bound,
        "scored_flop_bound": scored[0] / scored[1],
        "flat_scored_flops": scored[0],
        "tree_scored_flops": scored[1],
    }


def num_scored_rows(forests: Sequence[Forest], masks: Sequence[NDArray[Any]]) -> int:
    """Rows that the head of a tree step computes: parents of the distinct tokens that any branch trains.

    Example: [5, 6, 7] and [5, 6, 8], all trained, have the rows of 5 and 6.
    """
    total, of_branch = 0, iter(masks)
    for forest in forests:
        wanted = np.zeros(forest.num_tokens, bool)
        for branch in range(forest.num_branches):
            wanted[forest.path(branch)[1:][next(of_branch)[1:] != 0]] = True
        total += np.unique(forest.parent[wanted]).size
    return total


def _scored_flops(shape: ModelShape, work: Work, num_rows: int) -> int:
    """FLOPs of forward and backward with the head on some rows only."""
    unscored = work.num_tokens - num_rows
    return train_flops(shape, work.num_tokens, work.num_pairs) - 6 * shape.hidden_size * shape.vocab_size * unscored
