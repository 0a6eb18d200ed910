"""`vllm_drafts`: the vLLM of a TRL trainer drafts from the run's earlier rollouts.

TRL makes its vLLM inside the trainer and has no argument for drafts, so they are set up around the making.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from trl.generation import vllm_generation

from treering.errors import StateError
from treering.extras import require
from treering.integrations.trl.overrides import Overrides
from treering.integrations.trl.vllm_batches import VLLMBatches
from treering.integrations.trl.vllm_hosts import Colocated, Served, VLLMHost, check_sampling, colocated_settings


@contextmanager
def vllm_drafts(history: Path | str, *, max_draft: int = 16) -> Iterator[None]:
    """Lets the vLLM of a trainer that is made inside draft from its earlier rollouts.

    The distribution of rollouts and their log-probs stay: vLLM verifies drafts. Each batch is recorded when it is
    sampled, and drafted from when its prompts come again. The trainer logs `rollout/tokens_per_forward` (tokens of a
    row and step, 1.0 without drafts) and `rollout/acceptance` (the share of drafted tokens that was accepted).

    With `vllm_mode="colocate"` the drafter is set up here. With `vllm_mode="server"` the server is started with it, on
    the same history: `docs/trl_rollouts.md` has the command.

    Args:
        history: folder of a `HistoryStore`, missing or not, that one run at a time writes. All processes of the run,
            and the server, must see it.
        max_draft: tokens per draft, 1 to 64; with a server its own setting counts.

    Raises:
        StateError: no trainer with `use_vllm=True` was made inside, or another process writes the history.
        UnsupportedError: a trainer or setting that drafts do not go with, or a vLLM that samples wrongly with drafts.
        ConfigError: a server that does not draft, or drafts from another history.

    Example:
        >>> with vllm_drafts("runs/history"):                                                 # doctest: +SKIP
        ...     trainer = GRPOTrainer(model, rewards, GRPOConfig(use_vllm=True), data)
        >>> trainer.train()                                                                   # doctest: +SKIP
    """
    making = _Making(Path(history).resolve(), max_draft)
    with (
        _replaced(transformers.Trainer, "__init__", making.note_trainer),
        _replaced(vllm_generation.VLLMGeneration, "_init_vllm", making.start),
    ):
        yield
    if not making.has_started:
        raise StateError(
            "vllm_drafts sets up the vLLM of a trainer that is made inside it, and none was; make the trainer in its "
            "with block, with use_vllm=True"
        )


class _Making:
    """The making of a trainer with its vLLM."""

    def __init__(self, folder: Path, max_draft: int) -> None:
        self._folder, self._max_draft = folder, max_draft
        self._trainer: Any = None
        self.has_started = False

    def note_trainer(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Makes a trainer's base; the next vLLM is its."""
        self._trainer = trainer
        original(trainer, *args, **kwargs)

    def start(self, original: Callable[..., None], generation: Any) -> None:
        """Starts the trainer's vLLM with drafts."""
        require("vllm_drafts", "vllm")
        check_sampling(self._trainer, generation)
        host = self._host(original, generation)
        VLLMBatches(self._trainer, generation, host, self._folder)
        self.has_started = True

    def _host(self, original: Callable[..., None], generation: Any) -> VLLMHost:
        if generation.mode == "server":
            original(generation)
            return Served(getattr(generation, "vllm_client", None), self._folder)
        with (
            colocated_settings(self._folder, self._max_draft) as ours,
            _replaced(vllm_generation, "LLM", lambda make, **theirs: make(**theirs, **ours)),
        ):
            original(generation)
        return Colocated(generation.llm)


@contextmanager
def _replaced(owner: Any, name: str, run: Callable[..., Any]) -> Iterator[None]:
    overrides = Overrides(owner)
    overrides.replace(name, run)
    try:
        yield
    finally:
        overrides.undo()
