"""How passes are captured, with a fake device: streams, their order, and the mode in which tensors are created."""

from collections.abc import Callable

import pytest
import torch

from tests.engine.test_torch_engine import assert_same, group_requests, run
from tests.models import build
from treering.engine.torch_engine import TorchEngine

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}


def test_a_trainer_may_capture_after_an_engine_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    ops = pytest.importorskip("treering.attention.triton.ops")
    if not ops.INTERPRETED:
        pytest.skip("the kernels are compiled here")
    made: list[torch.Tensor] = []

    def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        # A tensor that the capture itself creates, like torch's random number state.
        made.append(torch.zeros(1))
        return work

    monkeypatch.setattr("treering.engine.decoder.cuda.decoder.capture", capture)
    requests = group_requests(2, 2, max_tokens=4)
    with torch.inference_mode():
        model = build("qwen3", **SMALL).eval()
        engine = TorchEngine(model, max_batch=4, backend="cuda")
        inside = run(engine, requests)
    assert made
    assert not any(tensor.is_inference() for tensor in made)
    # Outside inference mode the same engine writes to the same memory.
    assert_same(run(engine, requests), inside, 0.0)
