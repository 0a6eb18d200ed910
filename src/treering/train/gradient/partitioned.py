"""Train one tree in partitions that read each other's state through gateways; gradients equal the whole tree's.

Partitions run depth-first: a partition's forward, then everything below it, then its own backward, which adds the
gradients that came back through its gateway. `Parents` says what happens to its activations in between. The loss of an
edge is computed in the partition of its parent token, so it needs no gateway, and right before the backward, so that no
logits are held.

    N tokens of the tree   M tokens of a partition
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention import TreeLayout
from treering.attention.ancestors import Ancestor
from treering.attention.gateway import Gateway
from treering.attention.states import boundary_of
from treering.model.edges import EdgeScores, EdgeTable, LossOf, edge_table, split_table
from treering.model.forward import hidden_states
from treering.train.gradient.activations import Parents, saved_on_host
from treering.train.gradient.edge_vectors import put_scores
from treering.train.gradient.passes import Unit
from treering.train.gradient.router_losses import Routing, branches_through, recorded_by
from treering.train.gradient.scoring import Scorer
from treering.train.progress import PhaseProgress
from treering.tree.forest import Forest
from treering.tree.pictures import rotary_positions
from treering.tree.plan.fragment import sight_of, take_fragment
from treering.tree.plan.partition import PartitionedTree

Event = tuple[Literal["enter", "leave"], int]
LossOfPartition = Callable[[int, EdgeTable], LossOf]
"""(partition number, its edges) -> the loss of some of them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenPartition:
    """A partition between its "enter" and "leave" events."""

    fragment: Forest
    layout: TreeLayout
    branches: Int64Array
    positions: NDArray[np.integer[Any]]
    hidden: Tensor | None = None
    router_loss: Tensor | None = None


class PartitionedStep:
    """The forwards and backwards of one partitioned tree.

    Attributes:
        tables: the scored edges of each partition.
        num_passes: number of forwards with a backward so far.
        num_recomputed: number of tokens recomputed so far.
    """

    def __init__(
        self,
        tree: PartitionedTree,
        wanted: BoolArray,
        scorer: Scorer,
        parents: Parents,
        routing: Routing | None = None,
        *,
        in_step: bool = False,
        progress: PhaseProgress | None = None,
    ) -> None:
        """`wanted`: bool [N], the tokens whose edges are scored; partitions without any in or below them are skipped.

        With `routing`, whose losses cover every token, and for ranks that run the same passes (`in_step`), no partition
        is skipped. `progress` counts the tokens of every partition that is left.
        """
        self._progress = progress
        self._runs_all = in_step or routing is not None
        self._tree = tree
        self._scorer = scorer
        self._parents = parents
        self.num_passes = 0
        self.num_recomputed = 0
        owner, place = np.empty((2, tree.forest.num_tokens), np.int64)
        for i, partition in enumerate(tree.partitions):
            owner[partition.tokens], place[partition.tokens] = i, np.arange(partition.tokens.size)
        table = edge_table(tree.forest, wanted)
        self.tables = split_table(table, owner, place, len(tree.partitions))
        self.owner_of_edge = np.full(tree.forest.num_tokens, -1, np.int64)
        self.place_of_edge = np.full(tree.forest.num_tokens, -1, np.int64)
        for i, part in enumerate(self.tables):
            self.owner_of_edge[part.edges], self.place_of_edge[part.edges] = i, np.arange(part.edges.size)
        self._routing = routing
        self._positions = rotary_positions(tree.forest)
        self._branches = branches_through(tree.forest)
        self._children = self._needed_children()
        self._live: dict[int, _OpenPartition] = {}

    def backward(self, loss_of: LossOfPartition) -> None:
        """Adds the gradients of the losses of all partitions to `.grad`."""
        for event, number in self._events():
            if event == "enter":
                self._enter(number)
            else:
                self._leave(number, loss_of)
                self._note(number)

    def score(self) -> EdgeScores:
        """Scores of all wanted edges at their packed indices, 0 elsewhere: [N] each, without gradients.

        The routing counts all tokens' routes in the same pass.
        """
        everywhere = self._scorer.no_scores(self._tree.forest.num_tokens)

        def put(number: int, table: EdgeTable, hidden: Tensor) -> None:
            put_scores(everywhere, self._scorer.scores(hidden, self._tree.forest, table), table)

        self.sweep(put)
        return everywhere

    def sweep(self, visit: Callable[[int, EdgeTable, Tensor], None]) -> None:
        """Runs every partition without gradients; `visit` gets its number, its edges and its hidden states."""
        with torch.no_grad():
            for event, number in self._events():
                if event == "leave":
                    del self._live[number]
                    continue
                live = self._live[number] = self._open(number)
                with recorded_by(self._routing) as routes:
                    hidden = self._hidden(live)
                if self._routing is not None:
                    self._routing.count(routes, live.branches)
                visit(number, self.tables[number], hidden)
                self._note(number)

    def _note(self, number: int) -> None:
        if self._progress is not None:
            self._progress.add(self._tree.partitions[number].tokens.size)

    def _enter(self, number: int) -> None:
        live = self._live[number] = self._open(number)
        has_children = bool(self._children[number])
        if has_children and self._parents == "recompute":
            with torch.no_grad():
                self._hidden(live)
            self.num_recomputed += live.fragment.num_tokens
            return
        with saved_on_host(self._scorer.parts) if has_children and self._parents == "offload" else nullcontext():
            self._compute(live)

    def _leave(self, number: int, loss_of: LossOfPartition) -> None:
        self.num_passes += 1
        live = self._live.pop(number)
        live.layout.close()
        if live.hidden is None:
            self._compute(live)
        hidden = live.hidden
        assert hidden is not None
        table = self.tables[number]
        # Gradients come back through the gateways even where the partition itself trains nothing.
        loss = 0.0 * hidden[0, 0] if table.edges.size else self._scorer.zero(hidden)
        if live.router_loss is not None:
            loss = loss + live.router_loss.to(loss.device)
        if table.edges.size:
            loss = loss + self._scorer.loss(hidden, self._tree.forest, table, loss_of(number, table))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def _compute(self, live: _OpenPartition) -> None:
        """The forward with gradients, and its router losses."""
        with recorded_by(self._routing) as routes:
            live.hidden = self._hidden(live)
        if self._routing is not None:
            live.router_loss = self._routing.loss(routes, live.branches)

    def _hidden(self, live: _OpenPartition) -> Tensor:
        return hidden_states(self._scorer.parts, live.fragment, live.layout, live.positions)

    def _open(self, number: int) -> _OpenPartition:
        """Prepares a partition: its tokens, and the gateways of the ancestors that they see."""
        partitions, forest = self._tree.partitions, self._tree.forest
        tokens = partitions[number].tokens
        fragment = take_fragment(forest, tokens)
        ancestors: list[Ancestor] = []
        above = partitions[number].parent
        while above >= 0:
            sight = sight_of(forest, partitions[above].tokens, tokens)
            gateway = self._live[above].layout.gateway
            assert gateway is not None
            if (sight.first < sight.stop).any():
                ancestors.append(Ancestor.from_sight(gateway, sight))
            above = partitions[above].parent
        gateway = Gateway() if self._children[number] else None
        parent = partitions[number].parent
        boundary = boundary_of(
            forest,
            partitions,
            number,
            self._children[number],
            above=self._live[parent].layout.boundary if parent >= 0 else None,
        )
        layout = TreeLayout(
            fragment,
            self._scorer.device,
            ancestors=tuple(ancestors),
            gateway=gateway,
            boundary=boundary,
            sees_whole_pictures=self._scorer.parts.sees_whole_pictures,
        )
        return _OpenPartition(
            fragment=fragment,
            layout=layout,
            branches=self._branches[tokens],
            positions=self._positions[..., tokens],
        )

    def _needed_children(self) -> list[list[int]]:
        """The children of each partition with scored edges in or below them; all children if none is skipped."""
        children: list[list[int]] = [[] for _ in self._tree.partitions]
        for number in range(len(children) - 1, 0, -1):
            if children[number] or self._has_loss(number):
                children[self._tree.partitions[number].parent].append(number)
        # Collected from last to first; run in packed order.
        return [numbers[::-1] for numbers in children]

    def _has_loss(self, number: int) -> bool:
        return self._runs_all or self.tables[number].edges.size > 0

    def _events(self) -> Iterator[Event]:
        if self._children[0] or self._has_loss(0):
            yield from depth_first(self._children)


def depth_first(children: Sequence[Sequence[int]]) -> Iterator[Event]:
    """Partitions from the first one on: one is entered before and left after all partitions below it.

    Example: a partition with one child gives enter 0, enter 1, leave 1, leave 0.
    """
    stack: list[Event] = [("leave", 0), ("enter", 0)]
    while stack:
        event, number = stack.pop()
        yield event, number
        if event == "enter":
            stack += [step for child in reversed(children[number]) for step in (("leave", child), ("enter", child))]


def score_unit(
    unit: Unit,
    wanted: BoolArray,
    scorer: Scorer,
    routing: Routing | None = None,
    *,
    in_step: bool = False,
    progress: PhaseProgress | None = None,
) -> EdgeScores:
    """Scores of the wanted edges of a micro-batch or a partitioned tree, see `PartitionedStep` and its `score`."""
    if isinstance(unit, PartitionedTree):
        return PartitionedStep(unit, wanted, scorer, "keep", routing, in_step=in_step, progress=progress).score()
    table = edge_table(unit.forest, wanted)
    with torch.no_grad():
        with recorded_by(routing) as routes:
            hidden = hidden_states(scorer.parts, unit.forest)
        scores = scorer.scores(hidden, unit.forest, table)
    if routing is not None:
        routing.count(routes, branches_through(unit.forest))
    everywhere = scorer.no_scores(unit.forest.num_tokens)
    put_scores(everywhere, scores, table)
    return everywhere
