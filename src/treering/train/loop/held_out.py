"""Evaluate a run on held-out data: when an evaluation is due, and the loss of held-out tasks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from treering import metrics
from treering.config.steps import ComputeOptions, Layout
from treering.files.step_lines import read_rows
from treering.ranks.group import RankGroup
from treering.train.branch_logprobs import mean_loss
from treering.train.loop.batches import TrainingTask, make_batch
from treering.train.loop.checkpoint import random_state, set_random_state
from treering.train.loop.compute import num_threads, precision, share_batch, tokens_on_ranks
from treering.train.progress import OnProgress

Measure = Callable[[OnProgress | None], Mapping[str, float]]
"""Measure the current weights without changing them; all ranks call it together."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Measurements before the first step of a run, every few steps, and after the last one.

    Attributes:
        measure: measures the current weights.
        every: steps between measurements; None measures only before the first and after the last.
        knows_first: whether an earlier start of the run has measured its initial weights.
        on_measured: called with each measurement and its step; the caller may set it at any time.
        measured: all measurements since the start, each with its "step".

    Example: with every=4, a run of 10 steps is measured at steps 0, 4, 8 and 10.
    """

    measure: Measure
    every: int | None = None
    knows_first: bool = False
    on_measured: Callable[[int, Mapping[str, float]], None] | None = None
    measured: list[Mapping[str, float]] = field(default_factory=list)

    def at(self, step: int, num_steps: int, on_progress: OnProgress | None) -> dict[str, float]:
        """Return the metrics of the weights after `step` of `num_steps`; empty if no measurement is due."""
        is_first = step == 0 and not self.knows_first
        if not is_first and step != num_steps and (step == 0 or self.every is None or step % self.every):
            return {}
        # A user's reward may draw from torch's random state, which training continues to use.
        before = random_state()
        try:
            values = dict(self.measure(on_progress))
        finally:
            set_random_state(before)
        self.measured.append({"step": step, **values})
        if self.on_measured is not None:
            self.on_measured(step, values)
        return values


def best_step(file: Path, last: int) -> int | None:
    """Return the first step up to `last` with the highest eval/reward or lowest eval/loss in a file; None if none has.

    The weights before the first step do not count: no checkpoint contains them.
    """
    rows = [row for row in read_rows(file) if 0 < row["step"] <= last]
    scores = {row["step"]: row[metrics.EVAL_REWARD] for row in rows if metrics.EVAL_REWARD in row}
    losses = {row["step"]: -row[metrics.EVAL_LOSS] for row in rows if metrics.EVAL_LOSS in row}
    found = scores or losses
    return max(found, key=found.__getitem__, default=None)


class HeldOutLoss:
    """Mean negative log-prob of the trained tokens of tasks, at temperature 1 and counted per branch.

    It does not depend on the objective and normaliser of the training, so runs can be compared.

    Example:
        >>> HeldOutLoss(model, tasks, compute=ComputeOptions())()              # doctest: +SKIP
        {'eval/loss': 2.31, 'eval/num_tokens': 5120}
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[TrainingTask],
        *,
        compute: ComputeOptions,
        layout: Layout = "tree",
        rank_group: RankGroup | None = None,
    ) -> None:
        """Share the tasks among the ranks of `rank_group`, if several train a prepared model."""
        self._model, self._compute = model, compute
        self._rank_group = RankGroup() if rank_group is None else rank_group
        self._max_tokens = tokens_on_ranks(compute)
        self._own = share_batch(make_batch(tasks, layout), self._rank_group).batch

    def __call__(self, on_progress: OnProgress | None = None) -> dict[str, float]:
        """Measure the current weights; metrics have the names of `treering.metrics`."""
        with num_threads(None, self._model), _evaluating(self._model), precision(self._model, self._compute.autocast):
            loss, num_tokens = mean_loss(
                self._model,
                self._own.forests,
                self._own.loss_masks,
                self._max_tokens,
                rank_group=self._rank_group,
                backend=self._compute.backend,
                on_progress=on_progress,
            )
        return {metrics.EVAL_LOSS: loss, metrics.EVAL_NUM_TOKENS: num_tokens}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
