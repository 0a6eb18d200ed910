"""Engines for several trained models, each of which loads the weights that a call names.

An engine copies weights, so only a few are kept; the longest idle one makes room. A model keeps its history, so
earlier rollouts are drafted under its next weights. Prompts that wait to be scored share one forward pass.

    N tokens of a prompt   K targets per position
"""

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treering.arrays import Int64Array
from treering.engine.host import EngineHost
from treering.engine.protocol import EngineStats, Request, Rollout, Sampling
from treering.engine.sampling.noise import call_id
from treering.engine.stop_strings import Decode
from treering.engine.torch_engine import TorchEngine
from treering.model.teacher import score
from treering.rl.drafting import Drafting
from treering.train.loop.trainee import SharedBase, TraineeOptions
from treering.train.targets import score_targets
from treering.tree.forest import Forest
from treering.types import TokenIds

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerWeights:
    """Weights to sample from: their name, and how to load them."""

    owner: str
    """Name of the trained model that has these weights; "" is the base model."""
    name: str
    options: TraineeOptions | None = None
    load: Callable[[PreTrainedModel], None] = lambda _: None
    """Loads them into a model with these options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Limits of each engine."""

    max_batch: int
    max_tokens: int
    num_engines: int = 3
    drafts: bool = True
    decode: Decode | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _WaitingPrompts:
    """Prompts that wait to be scored together."""

    prompts: list[tuple[TokenIds, Int64Array | None, int]] = field(default_factory=list)
    answers: "list[Future[PromptScores]]" = field(default_factory=list)


TopTokens = tuple[Int64Array, NDArray[np.float64]]
"""Token ids and log-probs [N, k] each: row t is for the distribution of token t."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Log-probs of a sequence's tokens.

    Attributes:
        logprobs: [N], NaN for the first token.
        targets: [N - 1, K], for the requested targets.
        top: likeliest tokens and their log-probs, [N, k] each: row t is for the distribution of token t.
    """

    logprobs: NDArray[np.float64]
    targets: NDArray[np.float64] | None = None
    top: TopTokens | None = None


class ModelSampler:
    """Engine of one model in its own thread, with the history of its rollouts."""

    def __init__(self, model: PreTrainedModel, options: EngineOptions) -> None:
        """Start the engine; no other engine may read `model`."""
        self._model = model
        self._drafting = Drafting()
        self._engine = TorchEngine(
            model,
            self._drafting.drafter if options.drafts else None,
            max_batch=options.max_batch,
            max_tokens=options.max_tokens,
            decode=options.decode,
        )
        self._engine.keep_rollouts()
        self.host = EngineHost(self._engine)
        self._counts: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._weights = ""
        self._num_inside = 0
        self._gate, self._is_left = asyncio.Lock(), asyncio.Event()
        self._waiting: _WaitingPrompts | None = None
        self._max_scored = options.max_tokens
        self.num_open = 0
        """Open calls, including waiting ones."""
        self.num_scored = self.num_score_passes = 0

    @property
    def stats(self) -> EngineStats:
        """Counts of the engine so far."""
        return self._engine.stats

    async def sample(
        self, weights: SamplerWeights, context: TokenIds, sampling: Sampling, num_samples: int, seed: int | None
    ) -> list[Rollout]:
        """Sample under some weights: a call with a seed gives the same answers again, any other gives new ones."""
        name = f"{call_id(context):x}"
        turn = nullcontext() if seed is None else self._turns.setdefault(name, asyncio.Lock())
        async with self._under(weights), turn:
            first = 0 if seed is not None else self._counts[name]
            self._counts[name] += num_samples
            requests = [
                # A prompt's history is found by its tokens; requests that run together are siblings.
                Request(
                    prompt_id=name if seed is None else f"{name} with a seed",
                    prompt=context,
                    sampling=sampling,
                    draw=seed or 0,
                    sample=first + i,
                )
                for i in range(num_samples)
            ]
            rollouts = await asyncio.gather(*(self.host.sample(request) for request in requests))
            self.host.run(lambda: self._note(rollouts))
        return rollouts

    def _note(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._drafting.add(rollout)

    async def score(
        self, weights: SamplerWeights, prompt: TokenIds, *, targets: Int64Array | None = None, top_k: int = 0
    ) -> PromptScores:
        """Score a sequence under some weights; sequences that wait at the same time share one forest."""
        answer: Future[PromptScores] = Future()
        async with self._under(weights):
            with self._lock:
                if self._waiting is None:
                    self._waiting = _WaitingPrompts()
                    self.host.run(self._score)
                self._waiting.prompts.append((prompt, targets, top_k))
                self._waiting.answers.append(answer)
            return await asyncio.wrap_future(answer)

    @asynccontextmanager
    async def _under(self, weights: SamplerWeights) -> AsyncIterator[None]:
        """Run the block under some weights, after calls under other weights have ended."""
        async with self._gate:
            if weights.name != self._weights:
                while self._num_inside:
                    self._is_left.clear()
                    await self._is_left.wait()
                self._weights = "unknown"
                await self._load(weights)
                self._weights = weights.name
            self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            self._is_left.set()

    async def _load(self, weights: SamplerWeights) -> None:
        loaded: Future[None] = Future()

        def load() -> None:
            try:
                with torch.no_grad():
                    weights.load(self._model)
                self._engine.update_weights(self._engine.version + 1, "abort")
                self._drafting.publish()
                loaded.set_result(None)
            except Exception as error:
                loaded.set_exception(error)

        if weights.owner:
            self.host.run(load)
            await asyncio.wrap_future(loaded)

    def _score(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        assert waiting is not None
        first = 0
        while first < len(waiting.prompts):
            last, size = first, 0
            while last < len(waiting.prompts) and (last == first or size < self._max_scored):
                size += waiting.prompts[last][0].size
                last += 1
            try:
                found = self._score_forest(waiting.prompts[first:last])
            except Exception as error:
                for answer in waiting.answers[first:last]:
                    with suppress(InvalidStateError):
                        answer.set_exception(error)
            else:
                for answer, scores in zip(waiting.answers[first:last], found, strict=True):
                    with suppress(InvalidStateError):
                        answer.set_result(scores)
            first = last

    def _score_forest(self, prompts: Sequence[tuple[TokenIds, Int64Array | None, int]]) -> list[PromptScores]:
        """Run one pass for the log-probs of all prompts, and one more if likeliest tokens are requested."""
        self.num_scored += sum(prompt.size for prompt, _, _ in prompts)
        self.num_score_passes += 1
        asked = [_targets(prompt, targets) for prompt, targets, _ in prompts]
        sequences = [prompt for prompt, _, _ in prompts]
        logprobs = score_targets(self._model, sequences, asked).logprobs
        most = max(top_k for _, _, top_k in prompts)
        forest = Forest.from_sequences(sequences)
        likeliest = score(self._model, forest, top_k=most).of_branches(forest) if most else None  # type: ignore[union-attr]
        found = []
        for i, (prompt, targets, top_k) in enumerate(prompts):
            wide = logprobs[i].reshape(prompt.size, -1)
            top = None if likeliest is None or not top_k else tuple(each[:, :top_k] for each in likeliest[i])
            found.append(
                PromptScores(
                    logprobs=np.concatenate([[np.nan], wide[:-1, 0]]),
                    targets=None if targets is None else np.where(targets < 0, 0.0, wide[:-1, 1:]),
                    top=top,  # type: ignore[arg-type]
                )
            )
        return found

    def close(self) -> None:
        """End the thread; open calls fail."""
        self.host.close()
        self._drafting.close()


def _targets(prompt: TokenIds, more: Int64Array | None) -> Int64Array:
    """Return the next token and the requested targets of each position, [N, 1 + K]; 0 as the last one's next token."""
    following = np.append(prompt[1:], 0).astype(np.int64)[:, None]
    if more is None:
        return following
    return np.concatenate([following, np.pad(np.maximum(more, 0), ((0, 1), (0, 0)))], 1)


class SamplerPool:
    """Engines of the most recently used models."""

    def __init__(self, base: SharedBase, options: EngineOptions) -> None:
        """Set up an empty pool; the engine of `base` is made at its first call."""
        self._base, self._options = base, options
        self._samplers: OrderedDict[str, ModelSampler] = OrderedDict()
        self._lock = asyncio.Lock()
        self._is_idle = asyncio.Condition()
        self._ended = EngineStats()

    async def sample(
        self, weights: SamplerWeights, context: TokenIds, sampling: Sampling, num_samples: int, seed: int | None = None
    ) -> list[Rollout]:
        """Sample from a model's engine, see `ModelSampler.sample`."""
        return await self._with(weights, lambda own: own.sample(weights, context, sampling, num_samples, seed))

    async def score(
        self, weights: SamplerWeights, prompt: TokenIds, *, targets: Int64Array | None = None, top_k: int = 0
    ) -> PromptScores:
        """Score with a model's engine, see `ModelSampler.score`."""
        return await self._with(weights, lambda sampler: sampler.score(weights, prompt, targets=targets, top_k=top_k))

    async def _with(self, weights: SamplerWeights, use: Callable[[ModelSampler], Awaitable[T]]) -> T:
        async with self._lock:
            sampler = await self._find(weights)
            sampler.num_open += 1
        try:
            return await use(sampler)
        finally:
            sampler.num_open -= 1
            async with self._is_idle:
                self._is_idle.notify_all()

    async def _find(self, weights: SamplerWeights) -> ModelSampler:
        found = self._samplers.get(weights.owner)
        if found is None:
            while len(self._samplers) >= self._options.num_engines:
                idle = next((owner for owner, each in self._samplers.items() if each.num_open == 0), None)
                if idle is not None:
                    await self.drop(idle)
                    continue
                async with self._is_idle:
                    await self._is_idle.wait()
            found = await asyncio.to_thread(self._make, weights)
            self._samplers[weights.owner] = found
        self._samplers.move_to_end(weights.owner)
        return found

    def _make(self, weights: SamplerWeights) -> ModelSampler:
        model = self._base.model
        if weights.options is not None:
            model = self._base.copy(replace(weights.options, seed=0)).requires_grad_(False)
        return ModelSampler(model, self._options)

    async def drop(self, owner: str) -> None:
        """End the engine of a model."""
        sampler = self._samplers.pop(owner, None)
        if sampler is not None:
            self._ended = _sum([self._ended, sampler.stats])
            await asyncio.to_thread(sampler.close)

    def stats(self, owner: str | None = None) -> dict[str, float]:
        """Return the counts so far: of all engines, or of one model's."""
        samplers = [each for name, each in list(self._samplers.items()) if owner in (None, name)]
        total = _sum([*([self._ended] if owner is None else []), *(each.stats for each in samplers)])
        return {
            "engines": len(samplers),
            "sampled_tokens": total.num_sampled,
            "prefilled_tokens": total.num_prefilled,
            "drafted_tokens": total.num_drafted,
            "accepted_tokens": total.num_accepted,
            "tokens_per_forward": total.tokens_per_forward,
            "scored_tokens": sum(each.num_scored for each in samplers),
            "score_passes": sum(each.num_score_passes for each in samplers),
        }

    async def close(self) -> None:
        """End all engines."""
        for owner in list(self._samplers):
            await self.drop(owner)


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(**{name: sum(getattr(each, name) for each in stats) for name in EngineStats.__slots__})
