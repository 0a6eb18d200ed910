"""A server of a tiny model for Tinker's own client."""

from collections.abc import Iterator
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

NAME = "tiny/model"
NUM_POSITIONS = 64
EOS = 31


@contextmanager
def serving(
    folder: Path, *, wide: bool = True, drafts: bool = True, key: str | None = None, **given: Any
) -> Iterator[tuple[str, TinkerRoutes]]:
    """Return the address of a server, and its routes."""
    model = (build_float64() if wide else build()).eval()
    engine = EngineOptions(max_batch=8, max_tokens=1024, drafts=drafts)
    options = TinkerOptions(
        folder=folder, num_positions=NUM_POSITIONS, engine=engine, stop_tokens=(EOS,), log=lambda _: None, **given
    )
    with EngineHost(TorchEngine(model, max_batch=8, max_tokens=1024, costs="none")) as host:
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
