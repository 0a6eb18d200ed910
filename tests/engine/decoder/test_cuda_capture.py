"""How passes are captured, with a fake device: streams, their order, and the mode in which tensors are created."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_torch_engine import assert_same, group_requests, run
from tests.models import build
from treering.engine.decoder.cuda import device
from treering.engine.torch_engine import TorchEngine

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}


class Stream:
    """Records which streams it waited for."""

    def __init__(self, device: object = None) -> None:
        self.device, self.waited_for = device, []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


class Played:
    """A fake of the parts of torch.cuda that a capture uses; `log` records work by stream, and captures."""

    def __init__(self) -> None:
        self.current: dict[str, Stream] = {}
        self.on: list[Stream] = []
        self.log: list[tuple[str, Stream]] = []
        self.options: list[dict[str, Any]] = []

    def current_stream(self, device: torch.device) -> Stream:
        return self.current.setdefault(str(device), Stream(device))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.on.append(stream)
        yield
        self.on.pop()

    @contextmanager
    def graph(self, graph: object, stream: Stream, **options: Any) -> Iterator[None]:
        self.options.append(options)
        self.on.append(stream)
        self.log.append(("captures", stream))
        yield
        self.on.pop()

    def work(self) -> None:
        self.log.append(("runs", self.on[-1]))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    device._capture_stream.cache_clear()
    played = Played()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    for name in ("current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    yield played
    device._capture_stream.cache_clear()


def test_every_capture_of_a_device_warms_up_and_runs_on_one_stream_of_that_device(played: Played) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for place in (first, second, first):
        device.capture(played.work, place)
    per_capture = ["runs", "runs", "captures", "runs"]
    assert [name for name, _ in played.log] == 3 * per_capture
    streams = [stream for _, stream in played.log]
    assert [stream.device for stream in streams] == 4 * [first] + 4 * [second] + 4 * [first]
    assert {*streams[:4]} == {*streams[8:]}
    assert len({*streams[:4]}) == len({*streams[4:8]}) == 1


def test_a_capture_is_ordered_with_other_work_and_allows_other_threads(played: Played) -> None:
    place = torch.device("cuda", 0)
    device.capture(played.work, place)
    stream, current = played.log[0][1], played.current_stream(place)
    assert stream.waited_for == [current]
    assert current.waited_for == [stream]
    assert played.options == [{"capture_error_mode": "thread_local"}]


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
