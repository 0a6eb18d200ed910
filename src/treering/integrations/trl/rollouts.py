"""Sample TRL rollouts with the embedded engine: batched, drafted from earlier epochs, with log-probs."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from transformers import TrainerCallback

from treering.arrays import Int32Array
from treering.compiling.once import is_compiled
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.speculation import COMPILE_S, LOAD_S, ObservedCosts
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import propose
from treering.integrations.trl.rollout_state import DraftHistory, PromptIds, has_state, load_state, save_state
from treering.metrics import TOKENS_PER_FORWARD

_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters, by the names that TRL, Hugging Face and the engine share."""
_IGNORED = frozenset({"use_cache", "pad_token_id", "bos_token_id", "disable_compile", "cache_implementation"})
"""Arguments of `generate` that do not change the distribution."""
_READ = ("rollout_func", "tools", "environment_factories", "_generate_single_turn", "_tokenize_prompts", "_metrics")
"""Attributes of a trainer that are read or replaced; only GRPOTrainer has all of them."""


def sampling_of(trainer: Any) -> Sampling:
    """Return a trainer's sampling parameters, including `generation_kwargs`.

    Raises:
        ConfigError: an argument of `generate` that the engine does not have.

    """
    values = {name: getattr(trainer, name) for name in _OWN}
    limit, stops = trainer.max_completion_length, tuple(trainer.eos_token_ids)
    for name, value in (trainer.args.generation_kwargs or {}).items():
        if name in _OWN:
            values[name] = value
        elif name in ("max_new_tokens", "eos_token_id"):
            given = value if isinstance(value, list | tuple) else (value,)
            limit, stops = (value, stops) if name == "max_new_tokens" else (limit, tuple(given))
        elif name not in _IGNORED and not (name == "do_sample" and value):
            raise ConfigError(
                f"HistoryRollouts samples with {', '.join(_OWN)}, got generation_kwargs[{name!r}]={value!r}; remove it"
            )
    if values["min_p"] is None:
        values["min_p"] = 0.0
    return Sampling(max_tokens=limit, stop_tokens=stops, **values)


def check_rollout_trainer(trainer: Any) -> None:
    """Check that the embedded engine can sample a trainer's rollouts correctly.

    Raises:
        UnsupportedError: another trainer, images, sharded weights, or another engine; names it.
    """
    missing = next((name for name in _READ if not hasattr(trainer, name)), None)
    if missing is not None:
        raise UnsupportedError(
            f"HistoryRollouts needs a GRPOTrainer as in TRL 1.16, but this {type(trainer).__name__} has no "
            f"{missing}; use GRPOTrainer, or remove HistoryRollouts"
        )
    if trainer._is_vlm:
        raise UnsupportedError(
            "HistoryRollouts samples text only, but this model takes images; use vLLM for its rollouts"
        )
    if trainer.use_vllm:
        raise UnsupportedError(
            "HistoryRollouts samples from the model in the trainer's process, but use_vllm=True starts another engine; "
            "set use_vllm=False, or remove HistoryRollouts and create the trainer inside vllm_drafts"
        )
    kind = trainer.accelerator.distributed_type.value
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UnsupportedError(
            f"HistoryRollouts reads whole weights in every process, but {kind} shards them; use DDP, or vLLM for the "
            "rollouts"
        )


def check_text(images: Any, fields: Any) -> None:
    """Check that prompts have no images.

    Raises:
        UnsupportedError: images, or other fields of a multimodal model.
    """
    if images is not None or fields:
        raise UnsupportedError("HistoryRollouts samples text only, but a prompt has images; remove them")


def check_single_turn(trainer: Any) -> None:
    """Check that a trainer's rollouts have one turn: `rollout_func` does not see later turns.

    Raises:
        UnsupportedError: the trainer has tools or environments.
    """
    if trainer.tools or getattr(trainer, "environment_factories", None):
        raise UnsupportedError(
            "TRL calls rollout_func for the first turn only, and model.generate after each tool call; remove "
            "rollout_func and call HistoryRollouts().attach(trainer)"
        )


_SPARE, _SPARE_FOR_TURNS = 1.25, 3.0
"""Slots of a new engine relative to what the requests need; later turns reuse the cache that spare slots keep."""


class TrainerEngine:
    """Creates an engine when requests arrive, and a larger one when they need more slots."""

    def __init__(self, costs: ObservedCosts, *, max_batch: int, num_threads: int | None) -> None:
        """Hold the options of `HistoryRollouts`."""
        self._costs, self._max_batch, self._num_threads = costs, max_batch, num_threads
        self._engine: TorchEngine | None = None
        self._drafter: Drafter | None = None
        self._num_slots = 0
        self.has_turns = False
        """Whether rollouts are continued, so that caching keys and values of finished ones pays off."""
        self.version = 0
        """Policy version of the latest weights; 0 before the first call."""

    def ready_for(self, requests: Sequence[Request], trainer: Any, drafter: Drafter | None) -> TorchEngine:
        """Return the engine with the trainer's current weights, enough slots, and the drafter.

        Example: the first call makes version 1; the next call after an optimizer step makes version 2.
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
        """Continue the version numbers of a checkpoint."""
        self.version = max(self.version, version)
        self._engine = None

    def _make(self, trainer: Any) -> TorchEngine:
        with _own_forward(trainer.model):
            engine = TorchEngine(
                trainer.model,
                max_batch=self._max_batch,
                max_tokens=self._num_slots,
                seed=trainer.args.seed,
                version=self.version + 1,
                num_threads=self._num_threads,
                costs=self._costs,
            )
        if self.has_turns:
            engine.keep_rollouts()
        return engine


def _num_slots(requests: Sequence[Request], max_batch: int) -> int:
    """Return the slots for a call's prompts and for the rollouts that run at once."""
    prompts = {request.prompt.tobytes(): request.prompt.size for request in requests}
    longest = max(request.sampling.max_tokens for request in requests)
    return sum(prompts.values()) + longest * min(max_batch, len(requests))


def _update(engine: TorchEngine) -> None:
    """Reload the weights if they changed because the trainer stepped or loaded a checkpoint."""
    try:
        engine.update_weights(engine.version)
    except InputError:
        engine.update_weights(engine.version + 1)


@contextmanager
def _own_forward(model: Any) -> Iterator[None]:
    """Run a model without Accelerate's autocast: the engine compares its logits with the weights' own."""
    wrapped = model.__dict__.get("forward")
    if wrapped is None or not hasattr(model, "_original_forward"):
        yield
        return
    model.forward = model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutTurn:
    """Rollout plus the tokens that its environment wrote after it."""

    first: Request
    """Request of its last turn."""
    so_far: Rollout

    def request(self, max_new: int) -> Request:
        """Return a request that continues the rollout by at most `max_new` tokens."""
        limit = self.so_far.num_tokens + max_new
        return replace(self.first, sampling=self.first.sampling.changed(max_tokens=limit), so_far=self.so_far)


class OpenTurns:
    """Rollouts of the engine's latest calls that a context may continue.

    Example: after the rollout 7 8 of the prompt 5 6, the context 5 6 7 8 9 continues it with the observed token 9.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Int32Array, Request, Rollout]] = []

    def take(self, contexts: Sequence[Sequence[int]]) -> list[RolloutTurn | None]:
        """Return the rollout that each context continues, each at most once; None for a new rollout."""
        return [self._take_one(np.asarray(context, np.int32)) for context in contexts]

    def put(self, requests: Sequence[Request], rollouts: Sequence[Rollout]) -> None:
        """Add the rollouts of a call; if all of them are first turns, drop the earlier ones."""
        if all(request.so_far is None for request in requests):
            self._open.clear()
        for request, rollout in zip(requests, rollouts, strict=True):
            self._open.append((np.concatenate([request.prompt, rollout.tokens]), request, rollout))

    def _take_one(self, context: Int32Array) -> RolloutTurn | None:
        fitting = [
            at
            for at, (tokens, _, _) in enumerate(self._open)
            if tokens.size < context.size and np.array_equal(context[: tokens.size], tokens)
        ]
        if not fitting:
            return None
        # The longest match is the newest turn of its rollout.
        tokens, request, rollout = self._open.pop(max(fitting, key=lambda at: self._open[at][0].size))
        return RolloutTurn(first=request, so_far=rollout.observe(context[tokens.size :]))


Drafts = Literal["auto", "off"]
"""auto: draft once measured steps show that drafts pay off. off: no drafts."""
Turns = tuple[list[list[int]], list[list[float]]]
"""Tokens and log-probs of each rollout's new turn, as TRL expects them."""

_NOT_COMPILED = (
    "history drafts need compiling once after installation, about ten seconds of processor time; a run too short to "
    "pay that back drafts nothing. To compile them first: python -c 'import treering; "
    "treering.Drafter(treering.HistoryStore()).warm_up()'"
)


class HistoryRollouts:
    """Sampler of a trainer's rollouts on `TorchEngine`: pass it as `rollout_func`, or `attach` it.

    A rollout depends only on the weights, the prompt, the sampling parameters, the seed and its key: drafts and batch
    size change no token (law 5). Weights are reloaded whenever they have changed. The trainer's checkpoints hold the
    draws and each prompt's latest rollouts.

    Args:
        id_column: dataset column with prompt ids; None: "prompt_id", "id" or "index" if present, else a hash of the
            prompt's tokens.
        drafts: "auto" drafts once measured steps show that it pays off, "off" never.
        max_loss: largest share of sampling time that drafts may cost without paying back.
        max_batch: rollouts that run at once.
        num_threads: torch threads while sampling; None: `TorchEngine` chooses.

    Raises:
        ConfigError: unknown `drafts`, or `max_loss` out of range.

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
        """Store the options; the first call or `attach` binds the trainer."""
        if drafts not in get_args(Drafts):
            raise ConfigError(f"drafts must be one of {', '.join(get_args(Drafts))}, got {drafts!r}")
        self._id_column, self._drafts = id_column, drafts
        self._is_compiled = is_compiled(propose)
        self._costs = ObservedCosts(max_loss=max_loss, load_s=LOAD_S if self._is_compiled else COMPILE_S)
        self._history = DraftHistory(self._costs)
        self._engine = TrainerEngine(self._costs, max_batch=max_batch, num_threads=num_threads)
        self._trainer: Any = None
        self._first_step = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return a completion for each prompt; equal prompts form a group. This is TRL's `rollout_func`.

        Returns:
            "prompt_ids", "completion_ids" and "logprobs", one list per prompt. Log-probs are of the sampled
            distribution, as TRL's importance correction expects.

        Raises:
            ConfigError: sampling parameters that the engine does not have.
            UnsupportedError: a trainer or model that the engine cannot sample correctly; names the reason.
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
        """Sample every turn of a trainer's rollouts, also after tool calls; return a function that undoes it.

        A later turn continues its rollout and reuses the cached keys and values.

        Raises:
            ConfigError: `id_column` is set, but a turn has only tokens, so its prompt is known by their hash.
            StateError: the trainer has a `rollout_func`.
            UnsupportedError: a trainer or model that the engine cannot sample correctly.

        Example: `HistoryRollouts().attach(trainer)` before `trainer.train()`, for a trainer with `tools`.
        """
        check_rollout_trainer(trainer)
        if trainer.rollout_func is not None:
            raise StateError("the trainer already samples with its rollout_func; remove that, or do not attach another")
        if self._id_column is not None:
            raise ConfigError(
                f"attached rollouts know a prompt only by the hash of its tokens, got id_column={self._id_column!r}; "
                "remove it"
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
        """Bind the trainer of the first call, and load its checkpoint's state."""
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise StateError("HistoryRollouts serves one trainer, but another one called it; create one for each")
        check_rollout_trainer(trainer)
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
                f"the run resumes at step {self._first_step}, but args.output_dir and args.resume_from_checkpoint have "
                "no state of its rollouts, so prompts are drawn as in a new run; pass the checkpoint's path as "
                "resume_from_checkpoint",
                stacklevel=2,
            )
            return
        self._engine.resume(load_state(folder, self._rank, self._ids, self._history))

    def _save(self, folder: Path) -> None:
        save_state(folder, self._rank, self._engine.version, self._ids, self._history)

    def _first_turns(self, prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]]) -> list[Request]:
        """Return requests for a batch of prompts; equal prompts are samples of one group."""
        sampling = sampling_of(self._trainer)
        names = [self._ids.of(prompt, ids) for prompt, ids in zip(prompts, prompt_ids, strict=True)]
        draws = self._ids.draw(dict.fromkeys(names))
        # Processes sample their parts of a group separately, each with its own noise.
        samples = Counter({name: self._rank * len(prompts) for name in names})
        requests = []
        for name, ids in zip(names, prompt_ids, strict=True):
            prompt, sample = np.asarray(ids, np.int32), samples[name]
            requests.append(Request(prompt_id=name, prompt=prompt, sampling=sampling, draw=draws[name], sample=sample))
            samples[name] += 1
        return requests

    def _sample_turns(self, turns: OpenTurns, contexts: Sequence[Sequence[int]]) -> Turns:
        """Return new tokens and their log-probs after each context, which may continue a rollout."""
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
        """Return the rollouts of requests, in order, under the trainer's current weights."""
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
        # Assume that the remaining steps take as long as those so far.
        num_done = state.global_step - self._first_step + 1
        num_left = max(0, state.max_steps - state.global_step - 1)
        self._costs.horizon_s = self._costs.total_s * (1 + num_left / num_done)


class _SaveState(TrainerCallback):  # type: ignore[misc]
    """Callback that saves the state of rollouts with a trainer's checkpoints."""

    def __init__(self, rollouts: HistoryRollouts) -> None:
        self._rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rollouts._save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _resumed_folder(trainer: Any) -> Path | None:
    """Return the folder of the checkpoint that a trainer resumed from, if it has the state of rollouts."""
    given = trainer.args.resume_from_checkpoint
    named = [Path(given)] if isinstance(given, str) and given else []
    folders = [*named, Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"]
    return next((folder for folder in folders if has_state(folder, trainer.accelerator.process_index)), None)
