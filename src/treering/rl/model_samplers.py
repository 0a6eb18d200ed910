"""Engines for several trained models, each of which loads the weights that a call names.

An engine copies weights, so only a few are kept; the longest idle one makes room. A model keeps its history, so
earlier rollouts are drafted under its next weights. Prompts that wait to be scored share one forward pass.

    N tokens of a prompt   K targets per position
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treering.arrays import Int64Array
from treering.engine.host import EngineHost
from treering.engine.protocol import EngineStats, Request, Rollout, Sampling
from treering.engine.sampling.noise import call_id, row_key
from treering.engine.sampling.torch_sampling import sample
from treering.engine.stop_strings import Decode
from treering.engine.torch_engine import TorchEngine
from treering.model.teacher import TeacherStates, score
from treering.rl.drafting import Drafting
from treering.rl.step_report import total_stats
from treering.train.loop.trainee import SharedBase, TraineeOptions
from treering.tree.forest import Forest
from treering.types import TokenIds

T = TypeVar("T")
MAX_COUNTED_PROMPTS = 65_536
"""Prompts of a model whose samples are counted."""


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


TopTokens = tuple[Int64Array, NDArray[np.float64]]
"""Token ids and log-probs [N, k] each: row t is for the distribution of token t."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Log-probs of a sequence's tokens.

    Attributes:
        logprobs: [N], NaN for the first token.
        targets: [N - 1, K], for the requested targets.
        top: likeliest tokens and their log-probs, [N, k] each: row t is for the distribution of token t.
        drawn: tokens drawn after the sequence, and their log-probs.
    """

    logprobs: NDArray[np.float64]
    targets: NDArray[np.float64] | None
    top: TopTokens | None
    drawn: tuple[TokenIds, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WaitingPrompt:
    """Prompt that waits to be scored, with the noise keys of the tokens to draw after it."""

    tokens: TokenIds
    targets: Int64Array | None
    top_k: int
    keys: Sequence[int]
    answer: "Future[PromptScores]" = field(default_factory=Future)


class ModelSampler:
    """Engine of one model in its own thread, with the history of its rollouts."""

    def __init__(self, model: PreTrainedModel, options: EngineOptions, host: EngineHost | None = None) -> None:
        """Start the engine, or use that of `host`, which stays open; no other engine may read `model`."""
        self._model = model
        self._drafting = Drafting()
        self._owns_host = host is None
        self.host = host or EngineHost(
            TorchEngine(model, max_batch=options.max_batch, max_tokens=options.max_tokens, decode=options.decode)
        )
        engine = self.host.engine
        assert isinstance(engine, TorchEngine)
        self._engine = engine
        self.host.run(engine.keep_rollouts)
        if options.drafts and not engine.has_drafter:
            self.host.run(lambda: engine.use_drafter(self._drafting.drafter))
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._weights = ""
        self._num_inside = 0
        self._gate, self._is_left = asyncio.Lock(), asyncio.Event()
        self._waiting: list[_WaitingPrompt] = []
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
            first = 0 if seed is not None else self._count(name, num_samples)
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
            for rollout in rollouts:
                self.host.run(partial(self._drafting.add, rollout))
        return rollouts

    def _count(self, name: str, num_samples: int) -> int:
        """Return how many samples of a prompt were asked for before these.

        The last `MAX_COUNTED_PROMPTS` prompts are remembered. One that was forgotten draws its first samples again.
        """
        first = self._counts.pop(name, 0)
        self._counts[name] = first + num_samples
        if len(self._counts) > MAX_COUNTED_PROMPTS:
            self._counts.popitem(last=False)
        return first

    async def score(
        self,
        weights: SamplerWeights,
        prompt: TokenIds,
        *,
        targets: Int64Array | None = None,
        top_k: int = 0,
        num_drawn: int = 0,
    ) -> PromptScores:
        """Score a sequence under some weights, and draw tokens after it as `sample` does at temperature 1.

        Sequences that wait at the same time share one forest.
        """
        async with self._under(weights):
            name = f"{call_id(prompt):x}"
            first = self._count(name, num_drawn) if num_drawn else 0
            keys = [row_key(0, name, 0, first + i) for i in range(num_drawn)]
            waiting = _WaitingPrompt(tokens=prompt, targets=targets, top_k=top_k, keys=keys)
            with self._lock:
                self._waiting.append(waiting)
                if len(self._waiting) == 1:
                    self.host.run(self._score)
            return await asyncio.wrap_future(waiting.answer)

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
            waiting, self._waiting = self._waiting, []
        while waiting:
            sizes = np.cumsum([prompt.tokens.size for prompt in waiting])
            num_next = 1 + int(np.searchsorted(sizes[:-1], self._max_scored))
            prompts, waiting = waiting[:num_next], waiting[num_next:]
            try:
                found = self._score_forest(prompts)
            except Exception as error:
                for prompt in prompts:
                    with suppress(InvalidStateError):
                        prompt.answer.set_exception(error)
            else:
                for prompt, scores in zip(prompts, found, strict=True):
                    with suppress(InvalidStateError):
                        prompt.answer.set_result(scores)

    def _score_forest(self, prompts: Sequence[_WaitingPrompt]) -> list[PromptScores]:
        """Run one pass for all that is asked of all prompts."""
        self.num_scored += sum(prompt.tokens.size for prompt in prompts)
        self.num_score_passes += 1
        forest = Forest.from_sequences([prompt.tokens for prompt in prompts])
        paths = [forest.path(i).astype(np.int64) for i in range(len(prompts))]
        states = score(self._model, forest)
        assert isinstance(states, TeacherStates)
        asked = [_targets(prompt.tokens, prompt.targets) for prompt in prompts]
        rows = [np.repeat(path, each.shape[1]) for path, each in zip(paths, asked, strict=True)]
        every = [torch.from_numpy(np.concatenate(each)) for each in (rows, [each.ravel() for each in asked])]
        logprobs = states.logprobs(*(each.to(states.hidden.device) for each in every)).cpu().numpy()
        most = max(prompt.top_k for prompt in prompts)
        top = states.top(most).of_branches(forest) if most else [None] * len(prompts)
        found = []
        ends = np.cumsum([each.size for each in asked])
        for prompt, path, values, likeliest in zip(prompts, paths, np.split(logprobs, ends[:-1]), top, strict=True):
            wide = values.reshape(path.size, -1)
            found.append(
                PromptScores(
                    logprobs=np.concatenate([[np.nan], wide[:-1, 0]]),
                    targets=None if prompt.targets is None else np.where(prompt.targets < 0, 0.0, wide[:-1, 1:]),
                    top=None
                    if likeliest is None
                    else (likeliest[0][:, : prompt.top_k], likeliest[1][:, : prompt.top_k]),
                    drawn=self._drawn(states.take(torch.from_numpy(path[-1:])), path.size, prompt.keys),
                )
            )
        return found

    def _drawn(self, last: TeacherStates, position: int, keys: Sequence[int]) -> tuple[TokenIds, NDArray[np.float64]]:
        """Draw a token for each key from the distribution after a prompt's last token."""
        num = len(keys)
        device = last.hidden.device
        drawn = sample(
            last.target(slice(None), 1.0, like=last.hidden.double()).logprobs.expand(num, -1),
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            positions=torch.full((num,), position, device=device),
            temperature=torch.ones(num, dtype=torch.float64, device=device),
            top_k=torch.zeros(num, dtype=torch.int64, device=device),
            top_p=torch.ones(num, dtype=torch.float64, device=device),
        )
        return drawn.tokens.int().cpu().numpy(), drawn.logprobs.cpu().numpy()

    def close(self) -> None:
        """End the thread; open calls fail."""
        if self._owns_host:
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

    def __init__(self, base: SharedBase, options: EngineOptions, host: EngineHost) -> None:
        """Set up an empty pool; `host` has the engine of `base`, and other engines are made at their first calls."""
        self._base, self._options, self._host = base, options, host
        self._samplers: OrderedDict[str, ModelSampler] = OrderedDict()
        self._lock = asyncio.Lock()
        self._is_idle = asyncio.Condition()
        self._ended = EngineStats()

    async def sample(
        self, weights: SamplerWeights, context: TokenIds, sampling: Sampling, num_samples: int, seed: int | None = None
    ) -> list[Rollout]:
        """Sample from a model's engine, see `ModelSampler.sample`."""
        return await self._with(weights, lambda own: own.sample(weights, context, sampling, num_samples, seed))

    async def score(self, weights: SamplerWeights, prompt: TokenIds, **asked: Any) -> PromptScores:
        """Score with a model's engine, see `ModelSampler.score`."""
        return await self._with(weights, lambda own: own.score(weights, prompt, **asked))

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
            while weights.owner and len(self._samplers.keys() - {""}) >= self._options.num_engines:
                idle = next((owner for owner, each in self._samplers.items() if owner and each.num_open == 0), None)
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
        if weights.options is None:
            return ModelSampler(self._base.model, self._options, self._host)
        model = self._base.copy(replace(weights.options, seed=0)).requires_grad_(False)
        return ModelSampler(model, self._options)

    async def keep(self, owners: Collection[str]) -> None:
        """End the idle engines of all other models but the base model."""
        for owner in [
            owner for owner, each in self._samplers.items() if owner not in ("", *owners) and each.num_open == 0
        ]:
            await self.drop(owner)

    async def drop(self, owner: str) -> None:
        """End the engine of a model."""
        sampler = self._samplers.pop(owner, None)
        if sampler is not None:
            self._ended = total_stats([self._ended, sampler.stats])
            await asyncio.to_thread(sampler.close)

    def stats(self, owner: str | None = None) -> dict[str, float]:
        """Return the counts so far: of all engines, or of one model's."""
        samplers = [each for name, each in list(self._samplers.items()) if owner in (None, name)]
        total = total_stats([*([self._ended] if owner is None else []), *(each.stats for each in samplers)])
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
