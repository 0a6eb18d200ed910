"""Between its first and last kernel a step reads no tensor's value on the host, which would wait for the device.

On CPU a read waits for nothing, so reads are detected by operation: torch operations that give Python a value, and
methods that expose a tensor's memory. Stock code of transformers may read; the tree step's own code may not.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import treering
from tests.forests import SHAPES
from tests.models import VOCAB, build
from treering.config.steps import RouterLosses
from treering.objectives import distill, dpo, grpo, gspo, sft
from treering.train import step as step_module
from treering.train.objective import Objective
from treering.train.step import BackwardResult, backward
from treering.tree.forest import Forest

OURS = str(Path(treering.__file__).parent)
READING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__", "__index__")
SEQUENCES = [*SHAPES["bushy"][:6], *SHAPES["prefixes of each other"]]


class HostReadError(Exception):
    """The tree step read a value on the host."""


def check_reader(what: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "torch" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and frame.f_code.co_filename.startswith(OURS):
        raise HostReadError(f"{what} at {frame.f_code.co_filename}:{frame.f_lineno}")


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in READING:
            check_reader(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse host reads in `_Passes.run`."""
    original = step_module._Passes.run

    def guarded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            check_reader(name)
            return method(tensor, *args, **kwargs)

        return call

    def unread(passes: Any) -> None:
        with monkeypatch.context() as inner, NoReads():
            for name in METHODS:
                inner.setattr(Tensor, name, guarded(getattr(Tensor, name), name))
            original(passes)

    with monkeypatch.context() as outer:
        outer.setattr(step_module._Passes, "run", unread)
        yield


def masks() -> list[list[int]]:
    return [[0] + [1] * (len(sequence) - 1) for sequence in SEQUENCES]


def teacher() -> nn.Module:
    model: Any = build("qwen3").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model


def advantages() -> list[float]:
    return [float(i % 3) - 1.0 for i in range(len(SEQUENCES))]


CASES: dict[str, tuple[str, Callable[[], Objective], dict[str, Any]]] = {
    "whole": ("qwen3", lambda: sft(masks()), {}),
    "partitioned": ("qwen3", lambda: grpo(advantages(), masks(), entropy_coefficient=0.01), {"max_tokens": 6}),
    "recomputed": ("qwen3", lambda: sft(masks()), {"max_tokens": 6}),
    "packed": ("llama", lambda: grpo(advantages(), masks()), {"max_tokens": 64}),
    "scored first": ("qwen3", lambda: gspo(advantages(), masks()), {"max_tokens": 6}),
    "pairs": ("qwen3", lambda: dpo([(0, 1), (2, 3)], masks()), {"max_tokens": 6}),
    "windows": ("mistral window", lambda: sft(masks()), {"max_tokens": 6}),
    "experts": ("qwen3_moe", lambda: sft(masks()), {"router_losses": RouterLosses(z=0.1), "max_tokens": 8}),
    "distilled": ("qwen3", lambda: distill(teacher(), loss_masks=masks()), {"max_tokens": 8}),
}


def step(model: nn.Module, objective: Objective, options: dict[str, Any]) -> BackwardResult:
    return backward(model, [Forest.from_sequences(SEQUENCES)], objective, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_no_value_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, objective, options = CASES[name]
    model: Any = build(family)
    if name == "recomputed":
        monkeypatch.setattr("treering.train.memory.free_memory", lambda device: 0.0)
    # The first use of a backend in a process runs its self-check.
    step(model, objective(), options)
    with no_reads(monkeypatch):
        result = step(model, objective(), options)
    assert result.num_trained_tokens > 0
    assert any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_a_head_in_chunks_reads_no_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.model.edges.MAX_LOGIT_ENTRIES", {"cpu": 3 * VOCAB})
    with no_reads(monkeypatch):
        assert step(build("qwen3"), sft(masks()), {}).num_trained_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["whole", "partitioned", "packed", "scored first", "pairs"])
def test_a_step_never_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, objective, options = CASES[name]
    model = build(family).cuda()
    step(model, objective(), options)
    original = step_module._Passes.run

    def unread(each: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(each)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(step_module._Passes, "run", unread)
    assert step(model, objective(), options).num_trained_tokens > 0
