"""Plain decoding: tokens per second of the engine without drafts against `model.generate`, by batch size.

A random model, prompts of one length and responses of one length: no side gains from stopping early, from sharing
prompts or from joining a running batch. Each side counts at its best number of threads, `generate` also at its best
cache.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.common.progress import OnProgress
from benchmarks.engine.cases import random_prompts
from benchmarks.engine.generate import CACHES, generate
from benchmarks.engine.runs import Best, Way, count_tokens, fastest, run_all, thread_counts, with_threads
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine

BATCH_SIZES = (1, 8, 16, 32)
PROMPT_LENGTH = 32
RESPONSE_LENGTH = 64


def measure_speed(
    model: PreTrainedModel,
    *,
    num_runs: int,
    on_progress: OnProgress,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    prompt_length: int = PROMPT_LENGTH,
    response_length: int = RESPONSE_LENGTH,
) -> list[dict[str, Any]]:
    """One result per batch size, ready for JSON: the fastest setting of each side, and the ratio of their speeds.

    Raises:
        InputError: fewer than one run.
    """
    results = []
    for size in batch_sizes:
        prompts, num_tokens = random_prompts(size, prompt_length), size * response_length
        ways = _ways(model, prompts, response_length)
        on_progress(f"plain decoding, batch {size}: warming up")
        for (_, count), way in ways.items():
            with_threads(count, way)
        best = fastest(ways, num_runs, partial(_tell, on_progress, size))
        cache = min(CACHES, key=lambda name: best[name].median_s)
        results.append(
            {
                "batch_size": size,
                "num_tokens": num_tokens,
                "generate": _speed("generate", cache, best[cache], num_tokens),
                "engine": _speed("engine", None, best["engine"], num_tokens),
                "ratio": best[cache].median_s / best["engine"].median_s,
            }
        )
    return results


def _ways(model: PreTrainedModel, prompts: NDArray[np.int32], num_new: int) -> dict[tuple[str, int], Way]:
    """The engine and each cache of `generate`, with each number of threads."""
    size, ways = len(prompts), dict[tuple[str, int], Way]()
    for count in thread_counts():
        engine = TorchEngine(model, max_batch=size, num_threads=count)
        ways["engine", count] = partial(_run_engine, engine, prompts, num_new)
        for cache in CACHES:
            ways[cache, count] = partial(
                generate, model, list(prompts), batch_size=size, max_tokens=num_new, cache=cache
            )
    return ways


def _run_engine(engine: TorchEngine, prompts: NDArray[np.int32], num_new: int) -> None:
    sampling = Sampling(max_tokens=num_new)
    requests = [Request(prompt_id=i, prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    assert count_tokens(run_all(engine, requests)) == len(prompts) * num_new


def _speed(side: str, cache: str | None, best: Best, num_tokens: int) -> dict[str, Any]:
    setting = {"side": side, "num_threads": best.num_threads, "cache": cache}
    return {"setting": setting, "tokens_per_s": num_tokens / best.median_s}


def _tell(on_progress: OnProgress, size: int, done: int, total: int) -> None:
    on_progress(f"plain decoding, batch {size}: run {done} of {total}")
