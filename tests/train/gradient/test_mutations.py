"""Typical errors of tree training, each built in on purpose: law 2's check must fail for every one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import build_float64
from tests.train.flat import Batch
from tests.train.gradient.test_backward import assert_step_is_exact, batch_of
from treering.model import edges
from treering.model.edges import EdgeTable
from treering.train.gradient import backward as step
from treering.train.gradient import evaluation
from treering.train.gradient import run as units
from treering.train.gradient.flat_batch import BatchEntries, FlatBatch
from treering.train.objectives import Entries
from treering.tree.forest import Forest

pytestmark = pytest.mark.usefixtures("no_self_check")

MODEL = build_float64()
SHARED_PROMPT = [3, 1, 4, 1, 5]
BATCH = batch_of([[[*SHARED_PROMPT, 9, 2, 6], [*SHARED_PROMPT, 5, 3], [*SHARED_PROMPT, 9, 2, 7, 7]]], seed=1)
BATCH = Batch(
    groups=BATCH.groups,
    masks=[[1] * len(sequence) for sequence in BATCH.sequences],
    advantages=[1.5, -1.0, 0.5],
    old_logprobs=BATCH.old_logprobs,
)


def leak_a_sibling(patch: pytest.MonkeyPatch) -> None:
    """Attention sees everything before it in packed order."""
    honest = Forest.from_sequences

    def leaky(sequences: object) -> Forest:
        forest = honest(sequences)  # type: ignore[arg-type]
        object.__setattr__(forest, "subtree_end", np.full_like(forest.subtree_end, forest.num_tokens))
        return forest

    patch.setattr(Forest, "from_sequences", leaky)


def shift_labels_in_packed_order(patch: pytest.MonkeyPatch) -> None:
    """Each token is predicted from the packed row before it."""
    honest = edges.edge_table

    def shifted(forest: Forest, wanted: np.ndarray | None = None) -> EdgeTable:
        table = honest(forest, wanted)
        order = np.argsort(table.edges)
        rows, edge_row = np.unique(table.edges[order] - 1, return_inverse=True)
        return EdgeTable(rows=rows, edges=table.edges[order], edge_row=edge_row)

    patch.setattr(units, "edge_table", shifted)


def number_positions_in_packed_order(patch: pytest.MonkeyPatch) -> None:
    """RoPE rotates by packed index instead of depth."""
    honest = units.hidden_states

    def misplaced(parts: object, forest: Forest) -> torch.Tensor:
        packed = np.arange(forest.num_tokens, dtype=np.int32)
        moved = Forest(**{name: getattr(forest, name) for name in FIELDS} | {"position": packed})
        return honest(parts, moved)  # type: ignore[arg-type]

    patch.setattr(units, "hidden_states", misplaced)


def drop_first_tokens_of_children(patch: pytest.MonkeyPatch) -> None:
    """A segment's first token has no label, because its row belongs to the parent segment."""
    honest = edges.edge_table

    def dropped(forest: Forest, wanted: np.ndarray | None = None) -> EdgeTable:
        kept = np.ones(forest.num_tokens, bool) if wanted is None else wanted.copy()
        kept[forest.segment_start] = False
        return honest(forest, kept)

    patch.setattr(units, "edge_table", dropped)


def average_advantages_before_clipping(patch: pytest.MonkeyPatch) -> None:
    """Shared tokens get the mean advantage of their branches: right for a linear loss, wrong under a clip."""
    honest = step.read_entries

    def averaged(forests: list[Forest], *rest: object) -> BatchEntries:
        entries = honest(forests, *rest)  # type: ignore[arg-type]
        indices, _ = forests[0].paths()
        advantages = entries.values["advantages"]
        means = np.bincount(indices, advantages) / np.maximum(np.bincount(indices), 1)
        return replace(entries, values={**entries.values, "advantages": means[indices]})

    patch.setattr(step, "read_entries", averaged)


def count_shared_tokens_once_too_few(patch: pytest.MonkeyPatch) -> None:
    """Shared tokens enter with the weight of one branch: gradients are not restored."""
    honest_entries, honest_batch = step.read_entries, step.flatten_batch
    repeated: list[np.ndarray] = []

    def note(forests: list[Forest], *rest: object) -> BatchEntries:
        indices, _ = forests[0].paths()
        _, first = np.unique(indices, return_index=True)
        repeated.append(~np.isin(np.arange(indices.size), first))
        return honest_entries(forests, *rest)  # type: ignore[arg-type]

    def unrestored(*given: object) -> FlatBatch:
        batch = honest_batch(*given)  # type: ignore[arg-type]
        batch.weights[repeated[-1]] = 0.0
        return batch

    patch.setattr(step, "read_entries", note)
    patch.setattr(step, "flatten_batch", unrestored)


def clip_the_sum_of_branches(patch: pytest.MonkeyPatch) -> None:
    """One clipped term per token instead of one per branch."""
    honest = Entries

    def summed(*, logprobs: torch.Tensor, values: dict[str, torch.Tensor], **rest: Any) -> Entries:
        return honest(
            logprobs=logprobs,
            values={**values, "old_logprobs": values["old_logprobs"].mean().expand_as(logprobs)},
            **rest,
        )

    patch.setattr(evaluation, "Entries", summed)


FIELDS = ("tokens", "parent", "position", "subtree_end", "branch_end", "segment_start", "segment_parent")
MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    leak_a_sibling,
    shift_labels_in_packed_order,
    number_positions_in_packed_order,
    drop_first_tokens_of_children,
    average_advantages_before_clipping,
    count_shared_tokens_once_too_few,
    clip_the_sum_of_branches,
]


@pytest.fixture(autouse=True)
def clean_gradients() -> Iterator[None]:
    yield
    MODEL.zero_grad(set_to_none=True)


def test_the_honest_step_passes() -> None:
    assert_step_is_exact(MODEL, BATCH, "grpo", "token_mean")


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_each_trap_breaks_law_2(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        assert_step_is_exact(MODEL, BATCH, "grpo", "token_mean")
