"""One message of an agent trace, and what must hold for the nodes of a trace and for a path that is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.errors import InputError
from treering.types import LossMask, TokenIds

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceNode:
    """One message of a trace, with the tokens that it adds to its path.

    Raises:
        InputError: arrays of different lengths, or numbers that are not finite.
    """

    parent: int | None
    """Index of the message before it; None at a root."""
    token_ids: TokenIds
    """int32 [T]; empty where the next message on the path has them, before what was sampled."""
    mask: LossMask
    """bool [T], True where the policy sampled the token."""
    sampled: bool
    """Whether a call of the model made the message."""
    logprobs: Floats | None = None
    """float64, one per True in `mask`, under the policy that sampled; None if they were not recorded."""
    advantages: Floats | None = None
    """float64, one per True in `mask`; None before they are assigned."""
    semantic_parents: tuple[tuple[int, str], ...] = ()
    """Nodes that caused it, each with the kind of the cause; they imply no shared tokens."""
    record: Mapping[str, Any]
    """Its JSON value, without the entries of the four arrays."""

    def __post_init__(self) -> None:
        num_tokens, num_sampled = self.token_ids.size, int(self.mask.sum())
        if self.mask.size != num_tokens:
            raise InputError(f"mask has one entry per token: {num_tokens} tokens, {self.mask.size} entries; align them")
        for name in ("logprobs", "advantages"):
            values = getattr(self, name)
            if values is None:
                continue
            if values.size != num_sampled:
                raise InputError(
                    f"{name} has one entry per True in mask: {num_sampled}, got {values.size} entries; align them"
                )
            if not np.isfinite(values).all():
                raise InputError(f"{name} must be finite numbers, got NaN or infinity; repair the source")


def path_to(nodes: tuple[TraceNode, ...], leaf: int) -> tuple[int, ...]:
    """The nodes from the root to a leaf."""
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].parent
    return tuple(reversed(path))


def check_tree(nodes: tuple[TraceNode, ...]) -> None:
    """Refuses parents that are no nodes of the trace or form a cycle.

    Raises:
        InputError: such a parent; the node is named.
    """
    for i, node in enumerate(nodes):
        parent = () if node.parent is None else ((node.parent, "parent"),)
        for other, name in (*parent, *((other, "semantic_parents") for other, _ in node.semantic_parents)):
            if not 0 <= other < len(nodes):
                raise InputError(f"nodes[{i}].{name} must be an index of {len(nodes)} nodes, got {other}; repair it")
    rooted: set[int] = set()
    for i in range(len(nodes)):
        trail: dict[int, None] = {}
        at: int | None = i
        while at is not None and at not in rooted:
            if at in trail:
                raise InputError(f"nodes[{at}] is its own ancestor, and parents lead to a root; repair its parent")
            trail[at] = None
            at = nodes[at].parent
        rooted.update(trail)


def check_path(nodes: tuple[TraceNode, ...], path: tuple[int, ...]) -> None:
    """Refuses a path without the token ids of a message, or with the log-probs of some sampled nodes only.

    Raises:
        InputError: such a path; the node is named.
    """
    _check_tokens(nodes, path)
    _check_logprobs(nodes, path)


def _check_tokens(nodes: tuple[TraceNode, ...], path: tuple[int, ...]) -> None:
    empty: int | None = None
    for i in path:
        node = nodes[i]
        if node.token_ids.size == 0:
            empty = i if empty is None else empty
        # The tokens of an empty message stand in the next node, before what was sampled; else nobody has them.
        if (node.token_ids.size == 0 and node.sampled) or (empty is not None and node.mask[:1].any()):
            raise InputError(
                f"nodes[{empty}] has no token_ids, and tokens are never rendered anew; record the run with a client "
                "that returns them (verifiers: client.type = train), or train its messages as a chat"
            )
        if node.token_ids.size:
            empty = None


def _check_logprobs(nodes: tuple[TraceNode, ...], path: tuple[int, ...]) -> None:
    sampled = [i for i in path if nodes[i].mask.any()]
    without = [i for i in sampled if nodes[i].logprobs is None]
    if without and len(without) < len(sampled):
        raise InputError(
            f"a path has log-probs at all sampled tokens or at none, and nodes[{without[0]}] has none; add them, or "
            "empty logprobs in all nodes to train without old log-probs"
        )
