"""The embedded engine of a TRL trainer: made for the first rollouts, with the present weights for all others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from treering.engine.request import Request
from treering.engine.speculation.observed_costs import ObservedCosts
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError
from treering.history.draft.drafter import Drafter

_SPARE, _SPARE_FOR_TURNS = 1.25, 3.0
"""Slots of a new engine, over those that the present requests need; later turns find in spare ones what earlier turns
computed."""


class TrainerEngine:
    """Makes an engine when there are requests, and another one when they need more slots."""

    def __init__(self, costs: ObservedCosts, *, max_batch: int, num_threads: int | None) -> None:
        """See `HistoryRollouts`."""
        self._costs, self._max_batch, self._num_threads = costs, max_batch, num_threads
        self._engine: TorchEngine | None = None
        self._drafter: Drafter | None = None
        self._num_slots = 0
        self.has_turns = False
        """Whether rollouts are continued, so that the keys and values of finished ones are worth their slots."""
        self.version = 0
        """Policy version of the latest weights; 0 before the first."""

    def ready_for(self, requests: Sequence[Request], trainer: Any, drafter: Drafter | None) -> TorchEngine:
        """The engine with the trainer's present weights, slots for the requests, and the drafter.

        Example: the first call makes version 1; after an optimizer step the next one is version 2.
        """
        num_slots = _num_slots(requests, self._max_batch)
        if self._engine is None or num_slots > self._num_slots:
            self._num_slots = int((_SPARE_FOR_TURNS if self.has_turns else _SPARE) * num_slots) + 1
            self._engine, self._drafter = self._make(trainer), None
        else:
            _update(self._engine)
        if drafter is not self._drafter:
            self._engine.use_drafter(drafter)
            self._drafter = drafter
        self.version = self._engine.version
        return self._engine

    def resume(self, version: int) -> None:
        """Counts versions on from a checkpoint's."""
        self.version = max(self.version, version)
        self._engine = None

    def _make(self, trainer: Any) -> TorchEngine:
        with _own_forward(trainer.model):
            return TorchEngine(
                trainer.model,
                max_batch=self._max_batch,
                max_tokens=self._num_slots,
                seed=trainer.args.seed,
                version=self.version + 1,
                num_threads=self._num_threads,
                costs=self._costs,
            )


def _num_slots(requests: Sequence[Request], max_batch: int) -> int:
    """Slots for the prompts of a call and for as many rollouts as run at once."""
    prompts = {request.prompt.tobytes(): request.prompt.size for request in requests}
    longest = max(request.sampling.max_tokens for request in requests)
    return sum(prompts.values()) + longest * min(max_batch, len(requests))


def _update(engine: TorchEngine) -> None:
    """Reads the weights again if they have changed: the trainer stepped, or loaded others."""
    try:
        engine.update_weights(engine.version)
    except InputError:
        engine.update_weights(engine.version + 1)


@contextmanager
def _own_forward(model: Any) -> Iterator[None]:
    """Runs a model without Accelerate's autocast: the engine compares its logits with the weights' own."""
    wrapped = model.__dict__.get("forward")
    if wrapped is None or not hasattr(model, "_original_forward"):
        yield
        return
    model.forward = model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped
