"""Fit the planner's cost model to timed tree steps of one model on one device, and cache it in a file.

Planning itself reads no clock. A run that must be repeatable keeps the file with its checkpoints.
"""

import hashlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from treering.errors import ConfigError, StateError
from treering.files.atomic import write_text
from treering.files.writing import writing
from treering.model.context import tree_attention
from treering.model.families import find_parts
from treering.train.gradient.backward import backward
from treering.train.objectives import sft
from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel
from treering.tree.stats import visible_pairs

NUM_TOKENS = 1024
"""Of the largest forests; more tokens separate pairs from tokens better."""

NUM_RUNS = 3
"""Timed runs of each forest, of which the median counts."""

_ROUNDING = 1e-9
"""Share of a measured time below which a fitted cost counts as zero."""


def fit_costs(model: nn.Module, *, backend: str = "auto") -> CostModel:
    """Times the tree step on eight small forests and fits seconds per token, pair and segment.

    Takes as long as training 24,000 tokens: about 5 s for a model of two layers and hidden
    size 256 on two cores. Leaves weights, their gradients and random states unchanged.

    Args:
        model: as for `backward`, on its device, with its training settings.
        backend: attention backend.

    Raises:
        StateError, UnsupportedError: see `backward`.
    """
    forests = probe_forests(NUM_TOKENS, find_parts(model).vocab_size)
    kept = [weight.grad for weight in model.parameters()]
    try:
        seconds = _median_seconds(model, forests, backend)
    finally:
        for weight, grad in zip(model.parameters(), kept, strict=True):
            weight.grad = grad
    return fit_seconds(forests, seconds)


def cached_costs(model: nn.Module, path: Path, *, backend: str = "auto") -> CostModel:
    """The costs in the file `path` if fitted to this model on this device, else new ones, written to the file.

    A file of another model, device, attention backend, thread count or version of torch is replaced. The file says why
    the backend was chosen.

    Raises:
        StateError: the file is corrupt or cannot be written; see also `fit_costs`.
    """
    with tree_attention(model, backend) as attention:
        key = _key(model, attention.backend)
    if path.exists():
        stored_key, costs = _read(path)
        if stored_key == key:
            return costs
    costs = fit_costs(model, backend=backend)
    with writing(path):
        stored = {"key": key, "attention": attention.reason, "costs": asdict(costs)}
        write_text(path, json.dumps(stored, indent=1))
    return costs


def probe_forests(num_tokens: int, vocab_size: int) -> list[Forest]:
    """Forests in which tokens, pairs and segments vary independently: chains of several lengths, stars, combs."""
    rng = np.random.default_rng(0)

    def run(length: int) -> list[int]:
        tokens: list[int] = rng.integers(0, vocab_size, length).tolist()
        return tokens

    def chains(count: int, length: int) -> Forest:
        return Forest.concatenate([Forest.from_sequences([run(length)]) for _ in range(count)])

    def star(prompt: int, width: int, response: int) -> Forest:
        # The first tokens differ by construction: random responses could merge, and their number would vary.
        shared = run(prompt)
        return Forest.from_sequences([[*shared, i % vocab_size, *run(response - 1)] for i in range(width)])

    def comb(count: int, length: int) -> Forest:
        spine = run(count * length)
        off = [(spine[i] + 1) % vocab_size for i in range(0, len(spine), length)]
        teeth = [[*spine[: i * length], off[i], *run(length - 1)] for i in range(1, count)]
        return Forest.from_sequences([spine, *teeth])

    n = num_tokens
    return [
        chains(1, n),
        chains(1, n // 4),
        chains(4, n // 4),
        chains(16, n // 16),
        star(n // 2, 8, n // 16),
        star(n // 4, 24, max(n // 64, 2)),
        comb(16, n // 32),
        comb(32, 4),
    ]


def fit_seconds(forests: Sequence[Forest], seconds: Sequence[float]) -> CostModel:
    """Non-negative least squares of the relative errors; a constant cost per call is fitted too, but not returned.

    If a constant alone fits best, as with a tiny model on a busy machine, the fit is repeated without it, so that some
    cost is always positive.

    Example: chains that take 0.1 s and 1 ms per token give token_s=0.001 and zeros.
    """
    counts = [[forest.num_tokens, visible_pairs(forest), forest.num_segments, 1] for forest in forests]
    measured = np.asarray(seconds, np.float64)
    rows = np.asarray(counts, np.float64) / measured[:, None]
    costs = _nonnegative_least_squares(rows, np.ones(measured.size))[:3]
    if (rows[:, :3] @ costs).max() < _ROUNDING:
        costs = _nonnegative_least_squares(rows[:, :3], np.ones(measured.size))
    token_s, pair_s, segment_s = costs.tolist()
    return CostModel(token_s=token_s, pair_s=pair_s, segment_s=segment_s)


def _nonnegative_least_squares(rows: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best non-negative solution over all subsets of columns."""
    scale = np.abs(rows).max(0)
    best, best_error = np.zeros(rows.shape[1]), np.inf
    for size in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), size)):
            found = np.linalg.lstsq(rows[:, columns] / scale[columns], target, rcond=None)[0] / scale[columns]
            error = float(np.linalg.norm(rows[:, columns] @ found - target))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(rows.shape[1]), error
                best[columns] = found
    return best


def _median_seconds(model: nn.Module, forests: Sequence[Forest], backend: str) -> list[float]:
    """Median seconds per forest; runs are interleaved, after a warm-up round."""
    seconds: list[list[float]] = [[] for _ in forests]
    device = next(model.parameters()).device
    for round_number in range(NUM_RUNS + 1):
        for number, forest in enumerate(forests):
            for weight in model.parameters():
                weight.grad = None
            _wait_for(device)
            start = time.perf_counter()
            backward(model, forest, sft(), backend=backend, ranks="alone")
            _wait_for(device)
            if round_number > 0:
                seconds[number].append(time.perf_counter() - start)
    return [statistics.median(runs) for runs in seconds]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(model: nn.Module, backend: str) -> dict[str, str | int | bool]:
    """Everything that the costs depend on."""
    weights = [(name, tuple(w.shape), str(w.dtype), w.requires_grad) for name, w in model.named_parameters()]
    heads = find_parts(model).config.num_attention_heads
    device = next(model.parameters()).device
    autocast = str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "off"
    return {
        "model": hashlib.sha256(repr((heads, weights)).encode()).hexdigest(),
        "gradient_checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
        "autocast": autocast,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "num_threads": torch.get_num_threads(),
        "backend": backend,
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    """What tells CPUs apart as far as a process sees it: architecture, vector instructions, number of cores."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} x {os.cpu_count()}"


def _read(path: Path) -> tuple[object, CostModel]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return stored["key"], CostModel(**stored["costs"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise StateError(
            f"{path} must hold fitted costs, and it does not ({error}); delete it to fit them again"
        ) from error
