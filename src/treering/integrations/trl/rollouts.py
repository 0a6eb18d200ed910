"""Rollouts of TRL's trainers from the embedded engine: batched, drafted from earlier epochs, with their log-probs."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import TrainerCallback

from treering.compiling.cached import is_compiled
from treering.engine.request import Request
from treering.engine.rollout import Rollout
from treering.engine.speculation.observed_costs import COMPILE_S, LOAD_S, ObservedCosts
from treering.errors import ConfigError, StateError
from treering.history.draft.kernel import propose
from treering.integrations.trl.draft_history import DraftHistory
from treering.integrations.trl.prompt_ids import PromptIds
from treering.integrations.trl.rollout_files import has_state, load_state, save_state
from treering.integrations.trl.rollout_settings import check_single_turn, check_text, check_trainer, sampling_of
from treering.integrations.trl.trainer_engine import TrainerEngine
from treering.integrations.trl.turns import OpenTurns
from treering.metrics import TOKENS_PER_FORWARD

Drafts = Literal["auto", "off"]
"""auto: where real steps show that drafts pay. off: none."""
Turns = tuple[list[list[int]], list[list[float]]]
"""Tokens and log-probs of each rollout's new turn, as TRL passes them."""

_NOT_COMPILED = (
    "history drafts are not compiled yet, which takes some ten seconds of a processor once after installation; a run "
    "that is too short to pay for it makes none. To compile them first: treering compile"
)


class HistoryRollouts:
    """Samples a trainer's rollouts with `TorchEngine`; give it to `rollout_func`, or `attach` it.

    A rollout depends on the weights, the prompt, the sampling parameters, the seed and its key alone: drafts and batch
    size change no token (law 5). The weights are read again whenever they have changed. A trainer's checkpoints hold
    the draws and each prompt's latest rollouts.

    Args:
        id_column: column of the training data with ids of its prompts; None takes "prompt_id", "id" or "index", where
            there is one, else a hash of a prompt's tokens.
        drafts: see `Drafts`.
        max_loss: share of the sampling time that drafts may cost without paying back.
        max_batch: rollouts that run at once.
        num_threads: torch threads while sampling; None leaves them as they are. A small model needs one.

    Raises:
        ConfigError: unknown `drafts`, or another share.

    Example:
        >>> rollouts = HistoryRollouts(id_column="id")                                       # doctest: +SKIP
        >>> trainer = GRPOTrainer(model, rewards, args, data, rollout_func=rollouts)         # doctest: +SKIP
        >>> trainer.train()                                                                  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        id_column: str | None = None,
        drafts: Drafts = "auto",
        max_loss: float = 0.025,
        max_batch: int = 64,
        num_threads: int | None = None,
    ) -> None:
        """Waits for its trainer, which the first call or `attach` gives it."""
        if drafts not in get_args(Drafts):
            raise ConfigError(f"drafts are one of {', '.join(get_args(Drafts))}, got {drafts!r}; choose one")
        self._id_column, self._drafts = id_column, drafts
        self._is_compiled = is_compiled(propose)
        self._costs = ObservedCosts(max_loss=max_loss, load_s=LOAD_S if self._is_compiled else COMPILE_S)
        self._history = DraftHistory(self._costs)
        self._engine = TrainerEngine(self._costs, max_batch=max_batch, num_threads=num_threads)
        self._trainer: Any = None
        self._first_step = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: a completion for each prompt, repeated prompts being a group.

        Returns:
            "prompt_ids", "completion_ids" and "logprobs", one list per prompt; log-probs are of the sampled
            distribution, as TRL's importance correction expects them.

        Raises:
            ConfigError: sampling that the engine has not.
            UnsupportedError: a trainer or model that the engine cannot serve rightly; names the reason.
        """
        self._bind(trainer)
        check_single_turn(trainer)
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        check_text(images, fields)
        rollouts = self._sample(self._first_turns(prompts, prompt_ids))
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [rollout.tokens.tolist() for rollout in rollouts],
            "logprobs": [rollout.logprobs.tolist() for rollout in rollouts],
        }

    def attach(self, trainer: Any) -> Callable[[], None]:
        """Samples every turn of a trainer's rollouts, those after tool calls too; returns what undoes it.

        A later turn continues the rollout that it belongs to, whose keys and values the engine still has.

        Raises:
            ConfigError: an `id_column`: a turn is tokens alone, whose hash names the prompt.
            StateError: the trainer has a `rollout_func`.
            UnsupportedError: see `__call__`.

        Example: `HistoryRollouts().attach(trainer)` before `trainer.train()`, for a trainer with `tools`.
        """
        check_trainer(trainer)
        if trainer.rollout_func is not None:
            raise StateError("a trainer with a rollout_func samples with that; leave it out, or do not attach another")
        if self._id_column is not None:
            raise ConfigError(
                "attached rollouts get the tokens of a prompt alone and know it by their hash, got id_column="
                f"{self._id_column!r}; leave it out"
            )
        turns = OpenTurns()
        self._engine.has_turns = True

        def generate(
            prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, has_tool_images: bool = False
        ) -> Turns:
            check_text(images, fields)
            self._bind(trainer)
            return self._sample_turns(turns, prompt_ids)

        trainer._generate_single_turn = generate
        return lambda: delattr(trainer, "_generate_single_turn")

    @property
    def _rank(self) -> int:
        rank: int = self._trainer.accelerator.process_index
        return rank

    def _bind(self, trainer: Any) -> None:
        """Takes the trainer of the first call, and what its checkpoint holds."""
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise StateError("HistoryRollouts samples for one trainer, and another one called it; make one for each")
        check_trainer(trainer)
        self._ids = PromptIds(trainer.train_dataset, self._id_column)
        self._trainer, self._first_step = trainer, trainer.state.global_step
        if self._drafts == "auto" and not self._is_compiled:
            trainer.accelerator.print(_NOT_COMPILED)
        trainer.add_callback(_SaveState(self))
        if self._first_step > 0:
            self._resume(_resumed_folder(trainer))

    def _resume(self, folder: Path | None) -> None:
        if folder is None:
            warnings.warn(
                f"the run goes on at step {self._first_step}, and its rollouts have no state in args.output_dir or "
                "args.resume_from_checkpoint: prompts are drawn as in a new run; name the checkpoint by the latter",
                stacklevel=2,
            )
            return
        self._engine.resume(load_state(folder, self._rank, self._ids, self._history))

    def _save(self, folder: Path) -> None:
        save_state(folder, self._rank, self._engine.version, self._ids, self._history)

    def _first_turns(self, prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]]) -> list[Request]:
        """Requests for a batch of prompts; equal prompts are samples of one group."""
        sampling = sampling_of(self._trainer)
        names = [self._ids.of(prompt, ids) for prompt, ids in zip(prompts, prompt_ids, strict=True)]
        draws = self._ids.draw(dict.fromkeys(names))
        # Processes sample their parts of a group apart, each with noise of its own.
        samples = Counter({name: self._rank * len(prompts) for name in names})
        requests = []
        for name, ids in zip(names, prompt_ids, strict=True):
            prompt, sample = np.asarray(ids, np.int32), samples[name]
            requests.append(Request(prompt_id=name, prompt=prompt, sampling=sampling, draw=draws[name], sample=sample))
            samples[name] += 1
        return requests

    def _sample_turns(self, turns: OpenTurns, contexts: Sequence[Sequence[int]]) -> Turns:
        """New tokens and their log-probs after each context, which may continue a rollout."""
        limit = sampling_of(self._trainer).max_tokens
        continued = turns.take(contexts)
        fresh = [ids for ids, turn in zip(contexts, continued, strict=True) if turn is None]
        first = iter(self._first_turns([None] * len(fresh), fresh))
        requests = [next(first) if turn is None else turn.request(limit) for turn in continued]
        rollouts = self._sample(requests)
        turns.put(requests, rollouts)
        begins = [0 if request.so_far is None else request.so_far.num_tokens for request in requests]
        new = list(zip(rollouts, begins, strict=True))
        tokens = [rollout.tokens[begin:].tolist() for rollout, begin in new]
        return tokens, [rollout.logprobs[begin:].tolist() for rollout, begin in new]

    def _sample(self, requests: list[Request]) -> list[Rollout]:
        """The rollouts of requests, in their order, under the trainer's present weights."""
        if self._drafts == "auto":
            self._history.prepare(requests)
        engine = self._engine.ready_for(requests, self._trainer, self._history.drafter)
        before = engine.stats
        found = {rollout.key: rollout for rollout in engine.generate(requests)}
        rollouts = [found[request.key] for request in requests]
        if self._drafts == "auto":
            self._history.keep(rollouts, engine.version)
        self._note_call(engine.stats.since(before).tokens_per_forward)
        return rollouts

    def _note_call(self, tokens_per_forward: float) -> None:
        model, state = self._trainer.model, self._trainer.state
        self._trainer._metrics["train" if model.training else "eval"][TOKENS_PER_FORWARD].append(tokens_per_forward)
        # As far as known, the steps that are left take as long as those so far.
        num_done = state.global_step - self._first_step + 1
        num_left = max(0, state.max_steps - state.global_step - 1)
        self._costs.horizon_s = self._costs.total_s * (1 + num_left / num_done)


class _SaveState(TrainerCallback):  # type: ignore[misc]
    """Saves the state of rollouts with a trainer's checkpoints."""

    def __init__(self, rollouts: HistoryRollouts) -> None:
        self._rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rollouts._save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _resumed_folder(trainer: Any) -> Path | None:
    """The folder of the checkpoint that a trainer was resumed from, if it has the state of rollouts."""
    given = trainer.args.resume_from_checkpoint
    named = [Path(given)] if isinstance(given, str) and given else []
    folders = [*named, Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"]
    return next((folder for folder in folders if has_state(folder, trainer.accelerator.process_index)), None)
