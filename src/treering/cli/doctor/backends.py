"""Which attention backends pass their self-check here, which one `auto` takes, and which decoder the engine takes."""

import time
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from treering.attention import BACKENDS, AttentionShape, Backend, choose_backend
from treering.attention.self_check import check_backend
from treering.engine.torch_engine import TorchEngine
from treering.errors import TreeringError

_SHAPES = {"cpu": (8, 2, 64, (torch.float32, torch.bfloat16)), "cuda": (32, 8, 128, (torch.bfloat16, torch.float32))}
"""Query heads, key heads, head size and dtypes that are checked on a kind of device: those of common models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """One backend on one device in one dtype.

    Attributes:
        backend: its name.
        device: "cpu", or "cuda:0" and so on.
        dtype: such as "bfloat16".
        has_passed: whether it may run; False for a wrong one, None for one that refuses what it was asked.
        error: the largest relative error of the output and the gradients; None where nothing ran.
        tolerance: the largest that counts as rounding.
        words: why it may not run, or what was checked.
        seconds: of the check, compiling included.
    """

    backend: Backend
    device: str
    dtype: str
    has_passed: bool | None
    error: float | None
    tolerance: float | None
    words: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """The attention backend and the decoder that a device gets for a dtype if nothing is set.

    Attributes:
        device: as in `BackendReport`.
        dtype: likewise.
        attention: the backend that `auto` takes, with the reason.
        engine: the engine's decoder for a small Qwen3, with the reason.
    """

    device: str
    dtype: str
    attention: str
    engine: str


def find_shapes() -> list[AttentionShape]:
    """What is checked: the CPU and every CUDA device, each in two dtypes."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [
        AttentionShape(num_heads, num_key_heads, head_size, dtype, device)
        for device in devices
        for num_heads, num_key_heads, head_size, dtypes in [_SHAPES[device.type]]
        for dtype in dtypes
    ]


def try_backends(shape: AttentionShape) -> list[BackendReport]:
    """Runs the self-check of every backend but the reference, which it compares with."""
    return [_try(backend, shape) for backend in BACKENDS if backend != "reference"]


def find_choice(shape: AttentionShape) -> ChoiceReport:
    """What `auto` takes for attention, and the engine for decoding."""
    choice = choose_backend("auto", shape)
    return ChoiceReport(
        device=str(shape.device),
        dtype=_name(shape.dtype),
        attention=f"{choice.backend} ({choice.reason})",
        engine=_engine_backend(shape),
    )


def _try(backend: Backend, shape: AttentionShape) -> BackendReport:
    error = tolerance = None
    started = time.perf_counter()
    try:
        found = check_backend(backend, shape)
        has_passed, error, tolerance = found.has_passed, found.error, found.tolerance
        words = found.leak or ("forward and backward" if found.has_gradients else "forward; no backward here")
    except TreeringError as refusal:
        has_passed, words = None, str(refusal)
    except Exception as failure:
        # Compilers of kernels raise what they like, and the other backends are still to be checked.
        has_passed, words = False, f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    return BackendReport(
        backend=backend,
        device=str(shape.device),
        dtype=_name(shape.dtype),
        has_passed=has_passed,
        error=error,
        tolerance=tolerance,
        words=words,
        seconds=time.perf_counter() - started,
    )


def _engine_backend(shape: AttentionShape) -> str:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    devices = [shape.device] if shape.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(shape.device, shape.dtype)
    try:
        return TorchEngine(model, max_batch=2, max_tokens=64).backend
    except Exception as failure:
        return f"none ({type(failure).__name__}: {' '.join(str(failure).split())[:300]})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
