"""Plain decoding: tokens per second of the engine without drafts against `model.generate`, by batch size.

A random model, prompts of one length and responses of one length: no side gains from stopping early, from sharing
prompts or from joining a running batch. Each side is judged at its best number of threads, `generate` also at its best
cache.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.engine.cases import OnProgress, random_prompts
from benchmarks.engine.generate import CACHES, Cache, generate
from benchmarks.engine.runs import Way, count_tokens, run_all, wall_medians
from treering.engine.request import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.train.loop.compute import num_threads as threads

BATCH_SIZES = (1, 8, 16, 32)
PROMPT_LENGTH = 32
RESPONSE_LENGTH = 64
MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to decode a batch."""

    side: Literal["generate", "engine"]
    num_threads: int
    cache: Cache | None = None
    """Of `generate`; None for the engine, which has its own."""

    @property
    def name(self) -> str:
        """Example: "generate, 2 threads, static cache"."""
        return f"{self.side}, {self.num_threads} threads" + (f", {self.cache} cache" if self.cache else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a setting reached: the median of its runs, by wall time."""

    setting: Setting
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedResult:
    """One batch size."""

    batch_size: int
    num_tokens: int
    """Response tokens per run."""
    generate: Speed
    """The fastest setting of `generate`."""
    engine: Speed
    """The fastest setting of the engine."""
    ratio: float
    """Tokens per second of the engine over those of `generate`."""
    speeds: list[Speed]
    """All settings."""


def measure_speed(
    model: PreTrainedModel,
    *,
    num_runs: int,
    on_progress: OnProgress,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    prompt_length: int = PROMPT_LENGTH,
    response_length: int = RESPONSE_LENGTH,
) -> list[SpeedResult]:
    """One result per batch size."""
    results = []
    for size in batch_sizes:
        prompts = random_prompts(size, prompt_length)
        ways = {setting: _way(setting, model, prompts, response_length) for setting in settings()}
        on_progress(f"plain decoding, batch {size}: warming up")
        for way in ways.values():
            way()
        named = {setting.name: way for setting, way in ways.items()}
        seconds = wall_medians(named, num_runs, partial(_tell, on_progress, size))
        num_tokens = size * response_length
        speeds = [Speed(setting=setting, tokens_per_s=num_tokens / seconds[setting.name]) for setting in ways]
        results.append(_result(size, num_tokens, speeds))
    return results


def thread_counts() -> list[int]:
    """Numbers of threads that are tried: powers of two, as far as there are processors."""
    num_processors = os.cpu_count() or 1
    return [count for count in (1, 2, 4, MAX_THREADS) if count <= num_processors]


def settings() -> list[Setting]:
    """All that are tried."""
    found = []
    for count in thread_counts():
        found += [Setting(side="generate", num_threads=count, cache=cache) for cache in CACHES]
        found.append(Setting(side="engine", num_threads=count))
    return found


def _way(setting: Setting, model: PreTrainedModel, prompts: NDArray[np.int32], num_new: int) -> Way:
    if setting.cache is not None:
        return partial(_run_generate, model, prompts, num_new, setting.num_threads, setting.cache)
    engine = TorchEngine(model, max_batch=len(prompts), num_threads=setting.num_threads)
    return partial(_run_engine, engine, prompts, num_new)


def _run_generate(
    model: PreTrainedModel, prompts: NDArray[np.int32], num_new: int, num_threads: int, cache: Cache
) -> None:
    with threads(num_threads):
        rollouts = generate(model, list(prompts), batch_size=len(prompts), max_tokens=num_new, cache=cache)
    assert sum(tokens.size for tokens in rollouts) == len(prompts) * num_new


def _run_engine(engine: TorchEngine, prompts: NDArray[np.int32], num_new: int) -> None:
    sampling = Sampling(max_tokens=num_new)
    requests = [Request(prompt_id=i, prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    assert count_tokens(run_all(engine, requests)) == len(prompts) * num_new


def _result(batch_size: int, num_tokens: int, speeds: list[Speed]) -> SpeedResult:
    generate = _fastest(speed for speed in speeds if speed.setting.side == "generate")
    engine = _fastest(speed for speed in speeds if speed.setting.side == "engine")
    return SpeedResult(
        batch_size=batch_size,
        num_tokens=num_tokens,
        generate=generate,
        engine=engine,
        ratio=engine.tokens_per_s / generate.tokens_per_s,
        speeds=speeds,
    )


def _fastest(speeds: Iterable[Speed]) -> Speed:
    return max(speeds, key=lambda speed: speed.tokens_per_s)


def _tell(on_progress: OnProgress, size: int, done: int, total: int) -> None:
    on_progress(f"plain decoding, batch {size}: run {done} of {total}")
