"""Agent traces: the messages of one agent run as a tree of token spans, and the trajectories on its paths.

An agent's history branches where it is rewritten: by parallel calls, sub-agents, compaction, or stripped reasoning. A
node has the tokens that its message adds, so the path from a root to a leaf has exactly the tokens that the policy saw.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.trajectory import MAX_COUNT, TaskId, Trajectory
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
    """Index of the previous message; None at a root."""
    token_ids: TokenIds
    """int32 [T]; empty if the next message on the path has them, before its sampled tokens."""
    mask: LossMask
    """bool [T], True where the policy sampled the token."""
    sampled: bool
    """Whether a call of the model made the message."""
    logprobs: Floats | None = None
    """float64, one per True in `mask`, under the policy that sampled; None if they were not recorded."""
    advantages: Floats | None = None
    """float64, one per True in `mask`; None before they are assigned."""
    semantic_parents: tuple[tuple[int, str], ...] = ()
    """Nodes that caused the message, each with the kind of cause; they do not imply shared tokens."""
    record: Mapping[str, Any]
    """JSON value of the node, without the entries of its four arrays."""

    def __post_init__(self) -> None:
        num_tokens, num_sampled = self.token_ids.size, int(self.mask.sum())
        if self.mask.size != num_tokens:
            raise InputError(f"mask has one entry per token, got {self.mask.size} for {num_tokens}; align them")
        for name in ("logprobs", "advantages"):
            values = getattr(self, name)
            if values is None:
                continue
            if values.size != num_sampled:
                raise InputError(
                    f"{name} has one entry per True in mask, got {values.size} for {num_sampled}; align them"
                )
            if not np.isfinite(values).all():
                raise InputError(f"{name} must be finite numbers, got NaN or infinity; repair the source")


Reason: TypeAlias = Literal["untrainable agent", "failed run", "rejected compaction", "nothing sampled"]
"""Why a path is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentTrace:
    """One run of one agent: a forest of messages, each a node.

    Raises:
        InputError: parents that are out of range or form a cycle, a trained path without token ids, or numbers out of
            range; the message names the node.

    Example: two answers to one question are three nodes, with the question as the parent of both answers, and two
    trajectories that share the question's tokens.
    """

    task_id: TaskId
    """The same for all runs of a task."""
    nodes: tuple[TraceNode, ...]
    """Messages in the order of their creation."""
    is_trainable: bool = True
    """Whether the agent is the trained policy, and not a judge or simulated user."""
    has_failed: bool = False
    """Whether the run ended with an error."""
    reward: float | None = None
    """Sum of the weighted rewards; None if nothing was scored."""
    step: int | None = None
    """Optimizer step for which it was sampled."""
    version: int | None = None
    """Oldest policy version that sampled it."""
    record: Mapping[str, Any]
    """JSON value of the trace, without its nodes."""
    episode: Mapping[str, Any] | None = None
    """JSON value of the trace's episode, without its traces; all traces of an episode share the object."""

    def __post_init__(self) -> None:
        _check_tree(self.nodes)
        for path in self.paths():
            _check_tokens(self.nodes, path)
            _check_logprobs(self.nodes, path)
        if self.reward is not None and not math.isfinite(self.reward):
            raise InputError(f"the weighted rewards add up to {self.reward}, which is not finite; repair the scores")
        for name in ("step", "version"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_COUNT:
                raise InputError(f"{name} lies in [0, {MAX_COUNT}], got {value}; correct it or drop it")

    def paths(self) -> list[tuple[int, ...]]:
        """Return the nodes of each trained path, root first, in the order of the leaves."""
        return [path for path, reason in self._paths() if reason is None]

    @property
    def num_trajectories(self) -> int:
        """Number of trained paths."""
        return len(self.paths())

    def left_out(self) -> Counter[Reason]:
        """Return the number of paths that are not trained, by reason.

        These are all paths of an untrained agent or of a failed run, compactions that were not accepted, and paths
        without a sampled token. verifiers and prime-rl skip the same paths.
        """
        return Counter(reason for _, reason in self._paths() if reason is not None)

    def trajectories(self) -> list[Trajectory]:
        """Return one trajectory per trained path: the tokens of its nodes, one after another.

        Log-probs are 0.0 at tokens that were not sampled, and None if none were recorded. Advantages are None if no
        node of the path has them, and 0.0 in nodes without. Each trajectory has the reward of the trace.

        Example: nodes with the tokens [1, 2] and, sampled, [3, 4] with the mask [False, True] give the tokens
        [1, 2, 3, 4], of which the last is trained.
        """
        found = []
        for path in self.paths():
            nodes = [self.nodes[i] for i in path]
            mask = np.concatenate([node.mask for node in nodes])
            found.append(
                Trajectory(
                    task_id=self.task_id,
                    tokens=np.concatenate([node.token_ids for node in nodes]),
                    loss_mask=mask,
                    logprobs=_spread(mask, [(node, node.logprobs) for node in nodes]),
                    advantages=_spread(mask, [(node, node.advantages) for node in nodes]),
                    reward=self.reward,
                    step=self.step,
                    version=self.version,
                )
            )
        return found

    def with_advantages(self, advantages: Iterable[float | npt.ArrayLike]) -> "AgentTrace":
        """Return a copy of the trace with advantages in its nodes.

        Args:
            advantages: one entry per trajectory, in the order of `trajectories()`: a number, or one per token as
                `treering.tree_advantages` returns them. Values of tokens that were not sampled are ignored.

        A node holds one advantage per sampled token, so trajectories that share a node must agree on it. Nodes that are
        not on a trained path keep their advantages.

        Raises:
            InputError: the number of entries differs from that of trajectories or tokens, a value is not finite, or two
                trajectories differ on a shared node.

        Example: `trace.with_advantages([trace.reward - mean] * trace.num_trajectories)`.
        """
        given, paths = list(advantages), self.paths()
        if len(given) != len(paths):
            raise InputError(
                f"a trace takes advantages for each of its trajectories, got {len(given)} for "
                f"{len(paths)}; use trace.num_trajectories to split a longer list"
            )
        assigned: dict[int, Floats] = {}
        for k, (path, values) in enumerate(zip(paths, given, strict=True)):
            for i, of_node in self._by_node(path, values, f"advantages[{k}]"):
                if not np.array_equal(assigned.setdefault(i, of_node), of_node):
                    raise InputError(
                        f"nodes[{i}] is shared and takes one advantage per token, got others in advantages[{k}] than "
                        "in a trajectory before; give shared tokens one value, as treering.tree_advantages does"
                    )
        nodes = [replace(node, advantages=assigned.get(i, node.advantages)) for i, node in enumerate(self.nodes)]
        return replace(self, nodes=tuple(nodes))

    def _paths(self) -> list[tuple[tuple[int, ...], Reason | None]]:
        parents = {node.parent for node in self.nodes}
        accepted = {i for node in self.nodes for i, kind in node.semantic_parents if kind == "compaction"}
        paths = [path_to(self.nodes, leaf) for leaf in range(len(self.nodes)) if leaf not in parents]
        return [(path, self._reason(path, is_accepted=path[-1] in accepted)) for path in paths]

    def _reason(self, path: tuple[int, ...], *, is_accepted: bool) -> Reason | None:
        if not self.is_trainable:
            return "untrainable agent"
        if self.has_failed:
            return "failed run"
        is_attempt = any(kind == "compaction_attempt" for _, kind in self.nodes[path[-1]].semantic_parents)
        if is_attempt and not is_accepted:
            return "rejected compaction"
        # A model message without token ids counts as sampled, so that `_check_tokens` refuses it.
        is_sampled = any(
            node.mask.any() or (node.sampled and not node.token_ids.size) for node in (self.nodes[i] for i in path)
        )
        return None if is_sampled else "nothing sampled"

    def _by_node(self, path: tuple[int, ...], values: float | npt.ArrayLike, name: str) -> Iterable[tuple[int, Floats]]:
        num_tokens = sum(self.nodes[i].token_ids.size for i in path)
        array = np.asarray(values, np.float64)
        if array.shape not in ((), (num_tokens,)):
            raise InputError(f"{name} is one number or one per token ({num_tokens}), got shape {array.shape}; align it")
        array = np.broadcast_to(array, num_tokens)
        stop = 0
        for i in path:
            node = self.nodes[i]
            start, stop = stop, stop + node.token_ids.size
            of_node = array[start:stop][node.mask]
            if not np.isfinite(of_node).all():
                raise InputError(f"{name} must be finite where tokens were sampled, and is not in nodes[{i}]")
            if of_node.size:
                yield i, of_node


def _spread(mask: LossMask, given: list[tuple[TraceNode, Floats | None]]) -> Floats | None:
    """Return one value per token, 0.0 if it was not sampled or its node has none; None if no node has values."""
    if all(values is None or values.size == 0 for _, values in given):
        return None
    spread = np.zeros(mask.size)
    spread[mask] = np.concatenate(
        [np.zeros(int(node.mask.sum())) if values is None else values for node, values in given]
    )
    return spread


def path_to(nodes: tuple[TraceNode, ...], leaf: int) -> tuple[int, ...]:
    """Return the indices of the nodes from the root to a leaf."""
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].parent
    return tuple(reversed(path))


def _check_tree(nodes: tuple[TraceNode, ...]) -> None:
    """Check that parents are nodes of the trace and do not form a cycle."""
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


def _check_tokens(nodes: tuple[TraceNode, ...], path: tuple[int, ...]) -> None:
    empty: int | None = None
    for i in path:
        node = nodes[i]
        if node.token_ids.size == 0:
            empty = i if empty is None else empty
        # The tokens of an empty message must be in the next node, before its sampled tokens.
        if (node.token_ids.size == 0 and node.sampled) or (empty is not None and node.mask[:1].any()):
            raise InputError(
                f"nodes[{empty}] has no token_ids, and tokens are never rendered again; record the run with a client "
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
