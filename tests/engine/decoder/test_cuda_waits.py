"""Passes and sampling exchange the fewest possible copies between host and device.

Torch's meta device computes nothing, so code that reads a result fails and every copy is visible.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY, batch_of
from tests.models import VOCAB, build
from treering.engine.batch.rows import make_columns
from treering.engine.batch.step_inputs import StepInputs, no_drafts
from treering.engine.batch.token_batch import of_sequence

interpreter = pytest.importorskip("triton.runtime.interpreter")
cases = pytest.importorskip("tests.engine.decoder.test_cuda_decoder")
verify = pytest.importorskip("treering.engine.decoder.cuda.verify")
pytestmark = [
    INTERPRETED_ONLY,
    pytest.mark.usefixtures("started"),
]
META = torch.device("meta")
CAPTURED = [batch_of(rows, VOCAB) for rows in (cases.FILLING, cases.GROWING)]
STARTED = [cases.wanting(CAPTURED[0], [4, 7]), cases.wanting(CAPTURED[1], [])]
COPY = "aten.copy_.default"


class Operations(TorchDispatchMode):
    """Record the names of operations that allocate tensors and of those between two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.making: list[str] = []
        self.between: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.between.append(str(func))
        if any(result.alias_info is None for result in func._schema.returns):
            self.making.append(str(func))
        return out


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects kernel names in launch order, instead of running them."""
    names: list[str] = []

    def run(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        assert all(tensor.device == META and tensor.is_contiguous() for tensor in tensors), kernel.__name__
        names.append(kernel.__name__)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return names


def decoder_of(dtype: torch.dtype) -> Any:
    weights = cases.weights_of(build("qwen2", **cases.SMALL).to(META, dtype))
    return cases.cuda.CudaDecoder(weights, cases.NUM_SLOTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_pass_allocates_nothing_and_does_not_touch_the_host(
    dtype: torch.dtype, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Operations] = []

    def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        with Operations() as operations:
            work()
        seen.append(operations)
        return work

    monkeypatch.setattr(cases.cuda, "capture", capture)
    decoder, (batch, _) = decoder_of(dtype), CAPTURED
    assert decoder.run(batch).shape == (batch.num_tokens, VOCAB)
    assert [(operations.making, operations.between) for operations in seen] == [([], [])]
    assert "attend_kernel" in started


@pytest.mark.parametrize("batches", [CAPTURED, STARTED], ids=["captured", "started"])
def test_a_pass_makes_one_copy_to_the_device_and_does_not_wait(batches: list[Any]) -> None:
    decoder = decoder_of(torch.float32)
    for batch in batches:
        # The first run also copies new addresses and allocates buffers.
        decoder.run(batch)
        with Operations() as operations:
            decoder.run(batch)
        assert operations.between == [COPY]


@pytest.mark.parametrize("has_duplicates", [False, True])
def test_sampling_makes_one_copy_to_the_device_and_waits_once(
    has_duplicates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[torch.Size] = []
    monkeypatch.setattr(verify, "to_host", lambda packed: waits.append(packed.shape) or np.ones(packed.shape))
    rows = np.arange(2)
    first = rows * 0 if has_duplicates else rows
    zeros = np.zeros(0, np.int64)
    inputs = StepInputs(of_sequence(np.arange(1 + first[-1])), rows, first, first, zeros)
    columns = make_columns(max_rows=2, max_context=1, max_stops=1)
    with Operations() as operations:
        verify.DeviceSampler(META).sample_and_verify(
            torch.empty(1 + first[-1], VOCAB, device=META), inputs, columns, no_drafts(2)
        )
    assert operations.between == [COPY]
    assert len(waits) == 1
