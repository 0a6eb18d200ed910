"""Agent traces: the messages of one agent run as a tree of token spans, and the trajectories on its paths.

An agent's history branches where it is rewritten: parallel calls, sub-agents, compaction, thoughts that are stripped.
A node has the tokens that its message adds, so a path from a root to a leaf is what the policy saw, token by token.
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


Reason: TypeAlias = Literal["untrainable agent", "failed run", "rejected compaction", "nothing sampled"]
"""Why a path is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One run of one agent: a forest of messages, each a node.

    Raises:
        InputError: parents that are no nodes or form a cycle, a path to train without token ids, or numbers out of
            range; the node is named.

    Example: two answers to one question are three nodes, of which the last two have the first as their parent, and two
    trajectories that share the question's tokens.
    """

    task_id: TaskId
    """The same for all runs of a task."""
    nodes: tuple[TraceNode, ...]
    """Messages in the order in which they were made."""
    is_trainable: bool = True
    """Whether the agent is the policy that is trained, and no judge or simulated user."""
    has_failed: bool = False
    """Whether the run ended with an error."""
    reward: float | None = None
    """Sum of the weighted rewards; None if nothing was scored."""
    step: int | None = None
    """Optimizer step for which it was sampled."""
    version: int | None = None
    """Oldest policy version that sampled it."""
    record: Mapping[str, Any]
    """Its JSON value, without the nodes."""
    episode: Mapping[str, Any] | None = None
    """The JSON value of the episode that it belongs to, without its traces; the same object in all of them."""

    def __post_init__(self) -> None:
        check_tree(self.nodes)
        for path in self.paths():
            check_path(self.nodes, path)
        if self.reward is not None and not math.isfinite(self.reward):
            raise InputError(f"the weighted rewards add up to {self.reward}, which is not finite; repair the scores")
        for name in ("step", "version"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_COUNT:
                raise InputError(f"{name} lies in [0, {MAX_COUNT}], got {value}; correct it or drop it")

    def paths(self) -> list[tuple[int, ...]]:
        """The nodes of each trained path, root first, in the order of the leaves."""
        return [path for path, reason in self._paths() if reason is None]

    @property
    def num_trajectories(self) -> int:
        """Number of trained paths."""
        return len(self.paths())

    def left_out(self) -> Counter[Reason]:
        """Number of paths that are not trained, by reason.

        They are all paths of an agent that is not trained or of a run that failed, compactions that were not accepted,
        and paths on which nothing was sampled. verifiers and prime-rl leave out the same.
        """
        return Counter(reason for _, reason in self._paths() if reason is not None)

    def trajectories(self) -> list[Trajectory]:
        """One trajectory per trained path: the tokens of its nodes, one after another.

        They have log-probs if they were recorded, 0.0 where a token was not sampled, and advantages if a node of the
        path has them, 0.0 in nodes without. Each has the reward of the whole trace.

        Example: nodes with the tokens [1, 2] and, sampled, [3, 4] with the mask [False, True] give the tokens
        [1, 2, 3, 4], of which the last is trained.
        """
        return [self._trajectory([self.nodes[i] for i in path]) for path in self.paths()]

    def with_advantages(self, advantages: Iterable[float | npt.ArrayLike]) -> "Trace":
        """The trace with advantages in its nodes.

        Args:
            advantages: for each trajectory in the order of `trajectories()` one number for all of it, or one per
                token, as `treering.tree_advantages` gives them. Values of tokens that were not sampled are not read.

        A node holds one advantage per sampled token. So trajectories that share a node must agree on it. Nodes on no
        trained path keep what they have.

        Raises:
            InputError: not one entry per trajectory or per token, values that are not finite, or a shared node with
                two values.

        Example: `trace.with_advantages([trace.reward - mean] * trace.num_trajectories)`.
        """
        given, paths = list(advantages), self.paths()
        if len(given) != len(paths):
            raise InputError(
                f"a trace takes advantages for each of its trajectories: {len(paths)} trajectories, {len(given)} "
                "entries; use trace.num_trajectories to split a longer list"
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
        # A message of the model without token ids is not left out: it is refused.
        is_sampled = any(
            node.mask.any() or (node.sampled and not node.token_ids.size) for node in (self.nodes[i] for i in path)
        )
        return None if is_sampled else "nothing sampled"

    def _trajectory(self, nodes: list[TraceNode]) -> Trajectory:
        mask = np.concatenate([node.mask for node in nodes])
        return Trajectory(
            task_id=self.task_id,
            tokens=np.concatenate([node.token_ids for node in nodes]),
            loss_mask=mask,
            logprobs=_spread(mask, [(node, node.logprobs) for node in nodes]),
            advantages=_spread(mask, [(node, node.advantages) for node in nodes]),
            reward=self.reward,
            step=self.step,
            version=self.version,
        )

    def _by_node(self, path: tuple[int, ...], values: float | npt.ArrayLike, name: str) -> Iterable[tuple[int, Floats]]:
        """The sampled nodes of a path with their values, one per sampled token."""
        num_tokens = sum(self.nodes[i].token_ids.size for i in path)
        array = np.asarray(values, np.float64)
        if array.shape not in ((), (num_tokens,)):
            raise InputError(
                f"{name} is one number or one per token: {num_tokens} tokens, got shape {array.shape}; align it"
            )
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
    """One value per token, 0.0 where none was sampled or given; None if no node has any."""
    if all(values is None or values.size == 0 for _, values in given):
        return None
    spread = np.zeros(mask.size)
    spread[mask] = np.concatenate(
        [np.zeros(int(node.mask.sum())) if values is None else values for node, values in given]
    )
    return spread


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
