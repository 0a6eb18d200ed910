"""Inputs of the device benchmark: a sweep of sharing, trees of fixed shapes, and bench sets."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gpu.data import Workload, read_workloads
from treering.data import AgentSpec, generate_trajectories, render
from treering.train.loop.batches import group_by_task
from treering.tree.forest import Forest
from treering.types import TokenIds

VOCAB_SIZE = 4096
"""Ids of generated trees lie below it, as those of folded sets do."""

GENERATED = "generated"
"""The name of trees that stand in for the bench sets."""


def shared_prefix(sharing: float, *, length: int = 2048, num_branches: int = 32) -> Workload:
    """Branches of one length with one common prefix and nothing else in common; all tokens train.

    1 - distinct / flat tokens is as close to `sharing` as whole tokens allow.

    Example: a sharing of 0.5 in 4 branches of 12 tokens is a prefix of 8: 8 + 4 * 4 = 24 of 48 tokens are distinct.
    """
    prefix = round(sharing * length * num_branches / (num_branches - 1))
    assert prefix < length, f"{num_branches} branches cannot share {sharing:.0%} of their tokens"
    rng = np.random.default_rng(5)
    shared = _run(rng, prefix)
    branches = tuple(np.concatenate([shared, _run(rng, length - prefix, first=i)]) for i in range(num_branches))
    masks = tuple(np.ones(length, np.int8) for _ in branches)
    return Workload(name=f"sharing {sharing:.2f}", groups=(branches,), masks=masks)


def set_workloads(folder: Path, spec: AgentSpec) -> list[Workload]:
    """The carried samples of the bench sets, or, where none were carried, one workload of generated trajectories."""
    return read_workloads(folder) or [generated_workload(spec)]


def generated_workload(spec: AgentSpec) -> Workload:
    """Generated trajectories of agents: a tree per task, loss on the agent's tokens."""
    tasks = group_by_task(render(list(generate_trajectories(spec))))
    masks = tuple(mask for task in tasks for mask in task.loss_masks)
    return Workload(name=GENERATED, groups=tuple(task.sequences for task in tasks), masks=masks)


def chain(num_tokens: int) -> Forest:
    """One sequence, as dense causal attention has it."""
    return Forest.from_sequences([_run(np.random.default_rng(6), num_tokens)])


def star(*, prompt: int, response: int, group: int) -> Forest:
    """A long prompt with many responses."""
    rng = np.random.default_rng(7)
    shared = _run(rng, prompt)
    return Forest.from_sequences([np.concatenate([shared, _run(rng, response, first=i)]) for i in range(group)])


def deep_tree(*, segment: int, depth: int) -> Forest:
    """Every segment has two children, down to `depth` segments.

    Example: a depth of 3 with segments of 10 is 1 + 2 + 4 segments: 70 tokens.
    """
    rng = np.random.default_rng(8)
    return Forest.from_sequences(list(_grown(rng, np.empty(0, np.int32), segment, depth)))


def forest_of(workload: Workload, max_tokens: int) -> Forest:
    """The first trees of a workload side by side, up to that many distinct tokens, one tree at least."""
    forests: list[Forest] = []
    for group in workload.groups:
        forest = Forest.from_sequences(group)
        if forests and sum(some.num_tokens for some in forests) + forest.num_tokens > max_tokens:
            continue
        forests.append(forest)
    return Forest.concatenate(forests)


def _grown(rng: np.random.Generator, above: TokenIds, segment: int, depth: int) -> Iterator[TokenIds]:
    for i in range(2 if above.size else 1):
        path = np.concatenate([above, _run(rng, segment, first=i)])
        if depth == 1:
            yield path
            continue
        yield from _grown(rng, path, segment, depth - 1)


def _run(rng: np.random.Generator, length: int, *, first: int | None = None) -> TokenIds:
    """Random tokens. Siblings are given different first ones, or chance would merge some of them."""
    tokens = rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)
    if first is not None and length:
        tokens[0] = first
    return tokens
