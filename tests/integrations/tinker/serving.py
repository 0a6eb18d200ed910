"""A server of a tiny model for Tinker's own client."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")

import tinker

from tests.models import build, build_float64
from treering.engine.host import EngineHost
from treering.engine.torch_engine import TorchEngine
from treering.rl.model_samplers import EngineOptions
from treering.serving import HostSampler, Server, ServerSettings
from treering.serving.tinker.routes import TinkerOptions, TinkerRoutes
from treering.serving.tinker.training_thread import Job
from treering.types import TokenIds

NAME = "tiny/model"
NUM_POSITIONS = 64
EOS = 31
PROMPT = [3, 5, 7, 2]
ADAM = tinker.AdamParams(learning_rate=1e-2)


def decode(tokens: TokenIds) -> str:
    """Return a letter for each token."""
    return "".join(chr(ord("A") + token) for token in tokens.tolist())


@contextmanager
def serving(
    folder: Path, *, wide: bool = True, drafts: bool = True, key: str | None = None, **given: Any
) -> Iterator[tuple[str, TinkerRoutes]]:
    """Return the address of a server, and its routes."""
    model = (build_float64() if wide else build()).eval()
    engine = EngineOptions(max_batch=8, max_tokens=1024, drafts=drafts, decode=decode)
    options = TinkerOptions(
        folder=folder, num_positions=NUM_POSITIONS, engine=engine, stop_tokens=(EOS,), log=lambda _: None, **given
    )
    with EngineHost(TorchEngine(model, max_batch=8, max_tokens=1024, costs="none", decode=decode)) as host:
        routes = TinkerRoutes(model, NAME, options, host)
        with Server(
            HostSampler(host),
            model=NAME,
            num_positions=NUM_POSITIONS,
            settings=ServerSettings(port=0, api_key=key),
            more=routes,
        ) as server:
            yield server.url, routes


def client(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-test")


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    """Return a sequence that is trained on its next tokens."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def ask(url: str, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw = response.read() or b"{}"
            return response.status, raw if "protobuf" in response.headers["Content-Type"] else json.loads(raw)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def batch() -> list[tinker.Datum]:
    return [datum([*PROMPT, 1, 4], weights=[0.0, 0, 0, 1, 1]), datum([*PROMPT, 9], weights=[0.0, 0, 0, 1])]


def loss_of(result: Any) -> float:
    return float(result.metrics["loss:sum"])


@contextmanager
def held(routes: TinkerRoutes) -> Iterator[None]:
    """Keep the training thread busy until the block ends."""
    is_over = threading.Event()
    routes._thread.submit(Job(model_id="other", run=is_over.wait))
    try:
        yield
    finally:
        is_over.set()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.01)
