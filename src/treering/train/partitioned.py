"""Train one tree in partitions that read each other's state through gateways; gradients equal the whole tree's.

Partitions run depth-first: the forward of a partition, then everything below it, then its backward, which adds the
gradients that came back through its gateway. Its activations are kept in between, or computed twice. The loss of an
edge is computed in the partition of its parent token, so it needs no gateway, and right before the backward, so no
logits are held.

    N tokens of the tree   M tokens of a partition
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treering.arrays import BoolArray, Int64Array
from treering.attention import TreeLayout
from treering.attention.gateway import Gateway, boundary_of
from treering.attention.layout import Ancestor
from treering.model.edges import EdgeScores, EdgeTable, LossOf, edge_table, split_table
from treering.model.forward import hidden_states
from treering.model.three_pass import backward_of
from treering.train.progress import PhaseProgress
from treering.train.router_losses import branches_through
from treering.train.scorer import Scorer, put_scores
from treering.tree.forest import Forest
from treering.tree.image_tokens import rotary_positions
from treering.tree.partition import PartitionedTree, query_ranges, take_fragment
from treering.tree.plan import Unit

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
    """Forwards and backwards of one partitioned tree.

    Attributes:
        tables: the scored edges of each partition.
        num_passes: number of forwards with a backward so far.
        num_recomputed: number of tokens recomputed so far.
    """

    def __init__(
        self,
        tree: PartitionedTree,
        table: EdgeTable,
        scorer: Scorer,
        *,
        keeps: bool = True,
        in_step: bool = False,
        progress: PhaseProgress | None = None,
    ) -> None:
        """Split `table`, the edges to score in the whole tree, over the partitions.

        Partitions without scored edges in or below them are skipped, except with router losses, which cover every
        token, and for ranks that run the same passes (`in_step`). `keeps`: keep the activations of partitions with
        children until their backward; otherwise compute them twice, with the same gradients. `progress` counts the
        tokens of each finished partition.
        """
        self._progress = progress
        self._runs_all = in_step or scorer.routing is not None
        self._tree = tree
        self._scorer = scorer
        self._keeps = keeps
        self.num_passes = 0
        self.num_recomputed = 0
        owner, local_index = np.empty((2, tree.forest.num_tokens), np.int64)
        for i, partition in enumerate(tree.partitions):
            owner[partition.tokens], local_index[partition.tokens] = i, np.arange(partition.tokens.size)
        self.tables = split_table(table, owner, local_index, len(tree.partitions))
        num_edges = int(table.edges.max(initial=-1)) + 1
        self.owner_of_edge, self.local_edge = np.full((2, num_edges), -1, np.int64)
        for i, part in enumerate(self.tables):
            self.owner_of_edge[part.edges], self.local_edge[part.edges] = i, np.arange(part.edges.size)
        self._positions = rotary_positions(tree.forest)
        self._branches = branches_through(tree.forest)
        self._children = self._needed_children()
        self._live: dict[int, _OpenPartition] = {}

    def backward(self, loss_of: LossOfPartition, before_last: Callable[[], None] = lambda: None) -> None:
        """Add the gradients of all partitions' losses to `.grad`; `before_last` runs before the last backward."""
        for event, number in self._events():
            if event == "enter":
                self._enter(number)
            else:
                if number == 0:
                    before_last()
                self._leave(number, loss_of)
                self._note(number)

    def score(self) -> EdgeScores:
        """Return the scores of all wanted edges at their packed indices, 0 elsewhere: [N] each, without gradients.

        In the same pass, router losses may count the routes of all tokens.
        """
        everywhere = self._scorer.no_scores(self._tree.forest.num_tokens)

        def put(number: int, table: EdgeTable, hidden: Tensor) -> None:
            put_scores(everywhere, self._scorer.scores(hidden, self._tree.forest, table), table)

        self.sweep(put)
        return everywhere

    def sweep(self, visit: Callable[[int, EdgeTable, Tensor], None]) -> None:
        """Run every partition without gradients; `visit` gets its number, its edges and its hidden states."""
        with torch.no_grad():
            for event, number in self._events():
                if event == "leave":
                    del self._live[number]
                    continue
                live = self._live[number] = self._open(number)
                hidden, _ = self._forward(live)
                visit(number, self.tables[number], hidden)
                self._note(number)

    def _note(self, number: int) -> None:
        if self._progress is not None:
            self._progress.add(self._tree.partitions[number].tokens.size)

    def _enter(self, number: int) -> None:
        live = self._live[number] = self._open(number)
        if self._children[number] and not self._keeps:
            with torch.no_grad():
                hidden_states(self._scorer.model, live.fragment, live.layout, live.positions)
            self.num_recomputed += live.fragment.num_tokens
            return
        live.hidden, live.router_loss = self._forward(live)

    def _leave(self, number: int, loss_of: LossOfPartition) -> None:
        self.num_passes += 1
        live = self._live.pop(number)
        live.layout.close()
        if live.hidden is None:
            live.hidden, live.router_loss = self._forward(live)
        hidden = live.hidden
        assert hidden is not None
        table = self.tables[number]
        # Gradients come back through the gateways even if the partition itself trains nothing.
        loss = 0.0 * hidden[0, 0] if table.edges.size else self._scorer.zero(hidden)
        if live.router_loss is not None:
            loss = loss + live.router_loss.to(loss.device)
        if table.edges.size:
            loss = loss + self._scorer.loss(hidden, self._tree.forest, table, loss_of(number, table))
        if loss.requires_grad:
            backward_of(loss)

    def _forward(self, live: _OpenPartition) -> tuple[Tensor, Tensor | None]:
        return self._scorer.forward(live.fragment, live.branches, live.layout, live.positions)

    def _open(self, number: int) -> _OpenPartition:
        """Prepare a partition: its tokens, and the gateways of the ancestors that they attend to."""
        partitions, forest = self._tree.partitions, self._tree.forest
        tokens = partitions[number].tokens
        fragment = take_fragment(forest, tokens)
        ancestors: list[Ancestor] = []
        above = partitions[number].parent
        while above >= 0:
            ranges = query_ranges(forest, partitions[above].tokens, tokens)
            gateway = self._live[above].layout.gateway
            assert gateway is not None
            if (ranges.first < ranges.stop).any():
                ancestors.append(Ancestor.from_ranges(gateway, ranges))
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
            sees_whole_images=self._scorer.model.sees_whole_images,
        )
        return _OpenPartition(
            fragment=fragment,
            layout=layout,
            branches=self._branches[tokens],
            positions=self._positions[..., tokens],
        )

    def _needed_children(self) -> list[list[int]]:
        """Return the children of each partition with scored edges in or below them; all children if none is skipped."""
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
    """Yield partitions from the first one on: each is entered before, and left after, all partitions below it.

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
    *,
    in_step: bool = False,
    progress: PhaseProgress | None = None,
) -> EdgeScores:
    """Return the scores of the wanted edges of a micro-batch or a partitioned tree; see `PartitionedStep.score`."""
    table = edge_table(unit.forest, wanted)
    if isinstance(unit, PartitionedTree):
        return PartitionedStep(unit, table, scorer, in_step=in_step, progress=progress).score()
    with torch.no_grad():
        hidden, _ = scorer.forward(unit.forest, branches_through(unit.forest) if scorer.routing else None)
        scores = scorer.scores(hidden, unit.forest, table)
    everywhere = scorer.no_scores(unit.forest.num_tokens)
    put_scores(everywhere, scores, table)
    return everywhere
