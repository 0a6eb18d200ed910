"""`attend`: the backends, the reference that defines them all, the self-check of each, and the choice among them.

A backend is checked against the reference before it computes anything for a user, once per shape in a process. The
small forest of the check holds what goes wrong: a fork within a block and one across blocks, an end that does not fill
a block, two trees, and a window that cuts paths where the model's layer has one. Rounding is judged by a tolerance, the
mask exactly: a hidden token must not change a bit of an output, and its gradient must be exactly 0.

    N tokens   H query heads   G key heads   D head size
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treering.attention.flash import flash_attention_on_forest
from treering.attention.flex import flex_attention_on_forest
from treering.attention.gateway import KeysValues
from treering.attention.layout import ScoreOptions, TreeLayout, join_differentiably
from treering.attention.segments import segment_attention
from treering.attention.triton import triton_attention
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.tree.forest import Forest

Backend = Literal["segments", "reference", "flex", "triton", "flash"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    backend: Backend = "segments",
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token of a forest over its own root-to-token path.

    The first call with a shape in a process checks the backend against the reference (`verify`). If the layout has
    ancestors or a gateway, keys, values and their gradients are exchanged there as layer `layer`.

    Args:
        query: [1, H, N, D] with positions already applied (RoPE by depth, not by packed index).
        key: [1, G, N, D]; H must be a multiple of G.
        value: [1, G, N, D].
        layout: layout of the forest; row i is its token i.
        options: scale, sliding window and softcap.
        sinks: [H] score of a key without a value that every query of a head sees (gpt-oss); None without sinks.
        backend: implementation to use.
        layer: index of the layer, the key in gateways.

    Returns:
        [1, H, N, D] in the dtype of `query`; differentiable.

    Raises:
        InputError: shapes do not match.
        UnsupportedError: the backend does not support the device, dtype, head size or gradient, or fails its
            self-check.
    """
    if query.shape[2] != layout.forest.num_tokens:
        raise InputError(f"attention got {query.shape[2]} rows for a forest of {layout.forest.num_tokens} tokens")
    if query.shape[1] % key.shape[1]:
        raise InputError(f"query heads must be a multiple of key heads, got {query.shape[1]} and {key.shape[1]}")
    if query.shape[2] == 0:
        return query
    # Autocast would round the scores and the running softmax, which backends keep in float32 or wider.
    with torch.autocast(query.device.type, enabled=False):
        verify(backend, AttentionShape.of_call(query, key, options, sinks))
        run = implementation(backend)
        return run(query, key, value, layout=layout, options=options, sinks=sinks, layer=layer)


def reference_attention(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    layout: TreeLayout,
    options: ScoreOptions,
    sinks: Float[Tensor, " H"] | None = None,
    layer: int = 0,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention of every token over its own path: softmax(scores of visible keys) v, by autograd.

    It computes in float32 or wider and rounds once, at the end.
    """
    key, value = join_differentiably(KeysValues(key, value), layout, layer)
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (heads.to(wide).repeat_interleave(groups, 1) for heads in (key, value))
    scores = query.to(wide) @ keys.mT * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~layout.visible(options.window), float("-inf"))
    if sinks is not None:
        per_row = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, per_row], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype)


def implementation(backend: Backend) -> Callable[..., Tensor]:
    """Return the function of a backend; all have the signature of `reference_attention`.

    Example: `implementation("reference")` is `reference_attention`.
    """
    return {
        "segments": segment_attention,
        "reference": reference_attention,
        "flex": flex_attention_on_forest,
        "triton": triton_attention,
        "flash": flash_attention_on_forest,
    }[backend]


OFF_SWITCH = "TREERING_SELF_CHECK"
"""Environment variable; "0" turns the self-check off."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative error. In float32, the order of sums costs up to 1e-6, and rounding products to tf32 up to 1e-3."""

TOLERANCE_EPS = 4
"""Tolerance of 16-bit dtypes, in units of their eps: weights, gradients and results are each rounded about once."""

LAUNCHES = {"flash": 700}
"""How often a check runs a backend on CUDA: 1 of 1,000 checks misses a fault of 1 in 100 launches. Older kernels of
FlashAttention-4 had one."""

_LENGTHS = (150, 90, 37, 61)
"""Tokens of the stem, of its two branches, and of a second tree: one block of 128 and a part of another."""

_CPU_LENGTHS = (15, 9, 4, 6)
"""Lengths on CPU, where no backend works in blocks."""


class AttentionShape(NamedTuple):
    """What decides which code a backend runs.

    Example: a layer of Qwen3-8B on a GPU has 32 query heads and 8 key heads of size 128, in bfloat16 on cuda:0.
    """

    num_heads: int
    num_key_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    has_window: bool = False
    softcap: float | None = None
    has_sinks: bool = False

    @classmethod
    def of_call(cls, query: Tensor, key: Tensor, options: ScoreOptions, sinks: Tensor | None) -> "AttentionShape":
        """Return the shape of a call of `attend`."""
        return cls(
            num_heads=query.shape[1],
            num_key_heads=key.shape[1],
            head_size=query.shape[3],
            dtype=query.dtype,
            device=query.device,
            has_window=options.window is not None,
            softcap=options.softcap,
            has_sinks=sinks is not None,
        )

    @property
    def options(self) -> ScoreOptions:
        """Scale, window and softcap of the self-check."""
        # Compiled code depends only on whether there is a window, so any window that cuts every path will do.
        window = self.lengths[-1] - 2 if self.has_window else None
        return ScoreOptions(scale=self.head_size**-0.5, window=window, softcap=self.softcap)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the parts of the self-check's forest."""
        return _CPU_LENGTHS if self.device.type == "cpu" else _LENGTHS


class SelfCheck(NamedTuple):
    """Result of a self-check.

    Attributes:
        error: the largest relative L2 error of the output and of the gradients, against the reference in float64.
        tolerance: the largest accepted error.
        leak: how a token was affected by another branch, as text; None where branches are isolated.
        has_gradients: whether gradients were compared; `flex` has none on CPU.
    """

    error: float
    tolerance: float
    leak: str | None
    has_gradients: bool

    @property
    def has_passed(self) -> bool:
        """Whether the backend may run."""
        return self.leak is None and self.error <= self.tolerance


def verify(backend: Backend, shape: AttentionShape) -> None:
    """Run `check_backend` the first time; the reference is not checked.

    Raises:
        UnsupportedError: the backend is wrong on this device; the message gives the errors and another backend.
    """
    if backend == "reference" or os.environ.get(OFF_SWITCH) == "0":
        return
    found = check_backend(backend, shape)
    if found.has_passed:
        return
    fault = found.leak or f"is off by {found.error:.1e} from the reference, at most {found.tolerance:.1e} is rounding"
    other = "reference" if backend == "segments" else "segments"
    raise UnsupportedError(
        f"the {backend} backend {fault} ({shape.num_heads} heads over {shape.num_key_heads} of size {shape.head_size}, "
        f"{shape.dtype}, {shape.device}): choose another, such as {other}; {OFF_SWITCH}=0 runs it unchecked"
    )


@cache
def check_backend(backend: Backend, shape: AttentionShape) -> SelfCheck:
    """Compare a backend with the reference on a small forest, forward and backward.

    It leaves torch's random states as they are. Without compiling it takes milliseconds.

    Raises:
        UnsupportedError: the backend refuses the shape.
    """
    has_gradients = not (backend == "flex" and shape.device.type == "cpu")
    forest = _forest(shape.lengths)
    layout = TreeLayout(forest, shape.device)
    # Hooks of a caller that offloads or counts what autograd saves must not see the check.
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    precise = torch.autocast(shape.device.type, enabled=False)
    no_warnings = warnings.catch_warnings()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients), precise, identity, no_warnings:
        # Torch warns in the first backward of a process, before it has a CUDA context.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        inputs = draw_inputs(shape, forest.num_tokens)
        wanted = _run("reference", [tensor.double() for tensor in inputs], layout, shape)
        got = _run(backend, inputs, layout, shape)
        num_more = LAUNCHES.get(backend, 1) - 1 if shape.device.type == "cuda" else 0
        errors = [_errors(got, wanted)]
        errors += [_errors(_run(backend, inputs, layout, shape), wanted) for _ in range(num_more)]
        error = float(torch.stack(errors).max())
        leak = _find_leak(backend, inputs, got[0], layout, shape) if math.isfinite(error) else None
    return SelfCheck(error, _tolerance(shape.dtype), leak, has_gradients)


def _forest(lengths: tuple[int, ...]) -> Forest:
    stem, first, second, other = (np.full(length, token) for token, length in enumerate(lengths))
    return Forest.from_sequences([np.concatenate([stem, first]), np.concatenate([stem, second]), other])


def draw_inputs(shape: AttentionShape, num_tokens: int) -> list[Tensor]:
    """Draw random queries, keys, values and a gradient of the output, [1, heads, N, D], and sinks [H] if needed.

    Every call draws the same values; torch's random states stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (shape.num_heads, shape.num_key_heads, shape.num_key_heads, shape.num_heads)
    shapes = [(1, count, num_tokens, shape.head_size) for count in heads]
    shapes += [(shape.num_heads,)] if shape.has_sinks else []  # type: ignore[list-item]
    return [torch.randn(size, generator=generator).to(shape.device, shape.dtype) for size in shapes]


def _run(backend: Backend, inputs: list[Tensor], layout: TreeLayout, shape: AttentionShape) -> list[Tensor]:
    """Return the output, then the gradients of queries, keys, values and sinks where gradients are enabled."""
    query, key, value, upstream, *rest = inputs
    leaves = [tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in (query, key, value, *rest)]
    sinks = leaves[3] if shape.has_sinks else None
    out = implementation(backend)(*leaves[:3], layout=layout, options=shape.options, sinks=sinks)
    if not torch.is_grad_enabled():
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _errors(got: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Return relative L2 errors of the output and the gradients; infinite where one is NaN."""
    pairs = zip(got, wanted, strict=True)
    errors = torch.stack([(mine.double() - right).norm() / right.norm().clamp_min(1e-30) for mine, right in pairs])
    return errors.nan_to_num(nan=math.inf)


def _find_leak(
    backend: Backend, inputs: list[Tensor], out: Tensor, layout: TreeLayout, shape: AttentionShape
) -> str | None:
    """Return how the first branch affects the second, as text; None if it does not."""
    _, first, second, _ = np.split(np.arange(layout.forest.num_tokens), np.cumsum(shape.lengths)[:-1])
    others = np.setdiff1d(np.arange(layout.forest.num_tokens), first)
    query, key, value, upstream, *rest = inputs
    changed = [tensor.index_fill(2, _rows(first, tensor), 3.0) for tensor in (key, value)]
    alone = torch.zeros_like(upstream).index_copy(2, _rows(second, upstream), upstream[:, :, second])
    again = _run(backend, [query, *changed, upstream, *rest], layout, shape)[0]
    if not torch.equal(again[:, :, others], out[:, :, others]):
        return "lets tokens see another branch"
    if not torch.is_grad_enabled():
        return None
    _, grad_query, grad_key, grad_value, *_ = _run(backend, [query, key, value, alone, *rest], layout, shape)
    is_zero = all(not grad[:, :, first].any() for grad in (grad_query, grad_key, grad_value))
    return None if is_zero else "gives a branch the gradient of another one"


def _rows(rows: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(tensor.device)


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, TOLERANCE_EPS * torch.finfo(dtype).eps)


CUDA_CANDIDATES: tuple[Backend, ...] = ("triton", "flash")
"""Backends that `auto` tries on a CUDA device."""

LAST_CANDIDATE: Backend = "flex"
"""Backend that `auto` tries if all candidates fail; never the fastest, and it compiles for 15 to 20 s."""

REPEATABLE: tuple[Backend, ...] = ("triton", "flex")
"""Backends with bitwise repeatable gradients, best first. In torch's deterministic mode, times do not decide."""

_STEM, _NUM_BRANCHES, _BRANCH = 8192, 32, 256
"""The forest that is timed has 16,384 tokens, so that the time is the device's and not the host's."""

_NUM_TIMED, _NUM_PASSES = 3, 4
"""Number of timings, and passes in a row in each."""


class BackendChoice(NamedTuple):
    """A backend, and the reason for the choice as text for a log."""

    backend: Backend
    reason: str


class Trial(NamedTuple):
    """Result of trying a backend: seconds of a forward and backward, or why it may not run."""

    backend: Backend
    seconds: float | None
    refusal: str | None = None


def choose_backend(requested: str, shape: AttentionShape) -> BackendChoice:
    """Choose the backend for `requested` ("auto" or a name), and give the reason.

    On CUDA `auto` checks and times `triton` and `flash`, once per shape in a process, and takes the fastest that
    passes, or `flex` if both fail. On other devices it is `segments`.

    Args:
        requested: "auto", or a name from `BACKENDS`.
        shape: shape of the model's attention.

    Raises:
        ConfigError: `requested` is not a backend.

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
    if all(trial.seconds is None for trial in trials):
        trials.append(trial_of(LAST_CANDIDATE, shape))
    return best_of(trials, is_deterministic=torch.are_deterministic_algorithms_enabled())


def best_of(trials: Sequence[Trial], *, is_deterministic: bool) -> BackendChoice:
    """Return the fastest backend that passed, or in deterministic mode the first of `REPEATABLE`; else `segments`.

    Example: triton with 1 ms and flex with 2 ms give triton; if triton was refused, flex, with the refusal in the
    reason.
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
    """Check a backend on its device and time it; any failure of a kernel or its compiler is a refusal."""
    try:
        verify(backend, shape)
        return Trial(backend, _seconds(backend, shape))
    except Exception as error:
        # Kernel compilers raise exceptions of any class; each means that this backend cannot run here.
        return Trial(backend, None, " ".join(str(error).split())[:300] or type(error).__name__)


def _seconds(backend: Backend, shape: AttentionShape) -> float:
    """Return the least seconds of a forward and backward on a tree of `_NUM_BRANCHES` branches."""
    stem = np.zeros(_STEM, np.int64)
    branches = [np.concatenate([stem, np.full(_BRANCH, 1 + i)]) for i in range(_NUM_BRANCHES)]
    layout = TreeLayout(Forest.from_sequences(branches), shape.device)
    query, key, value, upstream, *_ = draw_inputs(shape._replace(has_sinks=False), layout.forest.num_tokens)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]

    def run() -> None:
        out = implementation(backend)(*leaves, layout=layout, options=shape.options)
        torch.autograd.grad(out, leaves, upstream)

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(shape.device.type, enabled=False):
        run()
        return min(_seconds_of_passes(run) for _ in range(_NUM_TIMED)) / _NUM_PASSES


def _seconds_of_passes(run: Callable[[], None]) -> float:
    """Return the seconds of the device, without the host's work before the first kernel and after the last."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_NUM_PASSES):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
