"""Choose the attention backend: the requested one, or for `auto` on CUDA the fastest that has proved itself."""

import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from treering.attention.backends import BACKENDS, Backend, implementation
from treering.attention.layout import TreeLayout
from treering.attention.self_check import AttentionShape, draw_inputs, verify
from treering.errors import ConfigError
from treering.tree.forest import Forest

CUDA_CANDIDATES: tuple[Backend, ...] = ("flex", "triton", "flash")
"""What `auto` tries on a CUDA device."""

REPEATABLE: tuple[Backend, ...] = ("triton", "flex")
"""Those with bitwise repeatable gradients, best first; in torch's deterministic mode no clock decides."""

_STEM, _NUM_BRANCHES, _BRANCH = 2048, 8, 256
"""The forest that is timed has 4,096 tokens."""

_NUM_TIMED = 3


class BackendChoice(NamedTuple):
    """A backend and the reason for it, in words for a log."""

    backend: Backend
    reason: str


class Trial(NamedTuple):
    """How a backend did: seconds of a forward and backward, or why it may not run."""

    backend: Backend
    seconds: float | None
    refusal: str | None = None


def choose_backend(requested: str, shape: AttentionShape) -> BackendChoice:
    """The backend for `requested` ("auto" or a name) and the reason.

    On CUDA `auto` checks and times every candidate, once per shape in a process, and takes the fastest that passes. On
    other devices it is `segments`.

    Args:
        requested: "auto", or a name from `BACKENDS`.
        shape: of the model's attention.

    Raises:
        ConfigError: no such backend.

    Example:
        >>> import torch
        >>> shape = AttentionShape(8, 2, 64, torch.float32, torch.device("cpu"))
        >>> choose_backend("auto", shape).backend
        'segments'
    """
    for backend in BACKENDS:
        if backend == requested:
            return BackendChoice(backend, "as requested")
    if requested != "auto":
        raise ConfigError(f"unknown attention backend {requested!r}: choose auto, {', '.join(BACKENDS)}")
    if shape.device.type == "cpu":
        return BackendChoice("segments", "auto: the fastest that is exact on CPU, as measured")
    if shape.device.type != "cuda":
        return BackendChoice("segments", f"auto: the only one that is exact on {shape.device.type}")
    trials = [trial_of(backend, shape) for backend in CUDA_CANDIDATES]
    return best_of(trials, is_deterministic=torch.are_deterministic_algorithms_enabled())


def best_of(trials: Sequence[Trial], *, is_deterministic: bool) -> BackendChoice:
    """The fastest backend that passed, or in deterministic mode the first of `REPEATABLE`; else `segments`.

    Example: triton with 1 ms and flex with 2 ms give triton; if triton was refused, flex, and the reason says so.
    """
    seconds = {trial.backend: trial.seconds for trial in trials if trial.seconds is not None}
    refusals = "".join(f"; {trial.backend}: {trial.refusal}" for trial in trials if trial.refusal is not None)
    if not seconds:
        return BackendChoice("segments", f"auto: no kernel may run here{refusals}")
    if is_deterministic:
        repeatable = next((backend for backend in REPEATABLE if backend in seconds), None)
        reason = "auto: the first with repeatable gradients that passed its self-check"
        return BackendChoice(repeatable or "segments", reason + refusals)
    times = ", ".join(
        f"{backend} {1e3 * seconds[backend]:.2f} ms" for backend in sorted(seconds, key=seconds.__getitem__)
    )
    return BackendChoice(min(seconds, key=seconds.__getitem__), f"auto: fastest of {times}{refusals}")


@cache
def trial_of(backend: Backend, shape: AttentionShape) -> Trial:
    """Checks a backend on its device and times it; any failure of a kernel or its compiler is a refusal."""
    try:
        verify(backend, shape)
        return Trial(backend, _seconds(backend, shape))
    except Exception as error:
        # Compilers of kernels raise what they like; whatever it is, this backend cannot run here.
        return Trial(backend, None, " ".join(str(error).split())[:300] or type(error).__name__)


def _seconds(backend: Backend, shape: AttentionShape) -> float:
    """Least seconds of a forward and backward on a tree of `_NUM_BRANCHES` branches."""
    stem = np.zeros(_STEM, np.int64)
    branches = [np.concatenate([stem, np.full(_BRANCH, 1 + i)]) for i in range(_NUM_BRANCHES)]
    layout = TreeLayout(Forest.from_sequences(branches), shape.device)
    query, key, value, upstream, *_ = draw_inputs(shape._replace(has_sinks=False), layout.forest.num_tokens)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    times = []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(shape.device.type, enabled=False):
        for _ in range(1 + _NUM_TIMED):
            _wait_for(shape.device)
            started = time.perf_counter()
            out = implementation(backend)(*leaves, layout=layout, form=shape.form)
            torch.autograd.grad(out, leaves, upstream)
            _wait_for(shape.device)
            times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
