"""`treering serve` serves the model that it names until it is ended."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.models import build
from treering.cli import run_serve
from treering.cli.options import ServeOptions
from treering.cli.run_serve import opened
from treering.config.model import LoraOptions
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.serving.tinker.routes import TinkerOptions
from treering.train.loop.lora_adapters import adapter_tensors, add_lora, save_adapter

OPTIONS = {"port": 0, "max_batch": 2, "max_tokens": 64, "device": "cpu"}


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "treering", "serve", str(tmp_path / "model"), "--port", "0", "--max-tokens", "64"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "it ended"
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
        body = {"token_ids": [3, 5], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        request = urllib.request.Request(found[0] + "/inference/v1/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as response:
            (choice,) = json.load(response)["choices"]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert "interrupted by SIGTERM" in process.stderr.read()
    assert process.returncode == 143
    engine = TorchEngine(model.eval(), max_batch=1, max_tokens=64, costs="none")
    (rollout,) = engine.generate([Request(prompt_id="", prompt=[3, 5], sampling=Sampling(max_tokens=4, top_k=1))])
    assert choice["token_ids"] == rollout.tokens.tolist()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"name": "nowhere"}, InputError, "nowhere"),
        ({"host": "0.0.0.0"}, ConfigError, "needs a key"),
        ({"step": 3}, InputError, "--step"),
    ],
)
def test_wrong_options_are_refused(
    given: dict[str, object], error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build().save_pretrained("model")
    with pytest.raises(error, match=words), opened(ServeOptions(**({"name": "model"} | OPTIONS | given))):
        pass


class Routes:
    """Stands in for Tinker's routes, whose package is not installed here, and keeps their options."""

    given: list[TinkerOptions]

    def __init__(self, _model: object, _name: str, options: TinkerOptions, _host: object) -> None:
        self.given.append(options)

    def routes(self, _server: object) -> list[object]:
        return []

    async def close(self) -> None: ...


def test_options_of_training_reach_its_routes_and_adapters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Routes, "given", [], raising=False)
    monkeypatch.setattr(run_serve, "TinkerRoutes", Routes)
    model = build()
    model.save_pretrained("model")
    cases: list[dict[str, object]] = [{}, {"sharing": "off", "drafts": "off", "checkpoints": Path("kept")}]
    for case in cases:
        with opened(ServeOptions(name="model", train=True, **(OPTIONS | case))):  # type: ignore[arg-type]
            pass
    found = [(each.shares, each.engine.drafts, each.folder) for each in Routes.given]
    assert found == [(True, True, Path("runs/tinker")), (False, False, Path("kept"))]
    assert {(each.num_positions, each.engine.max_batch, each.engine.max_tokens) for each in Routes.given} == {
        (64, 2, 64)
    }
    add_lora(model, LoraOptions(rank=2), base="model")
    Path("adapted").mkdir()
    save_adapter(model, adapter_tensors(model, dict(model.named_parameters())), Path("adapted"))
    with (
        pytest.raises(UnsupportedError, match="merge them first"),
        opened(ServeOptions(name="adapted", train=True, **OPTIONS)),  # type: ignore[arg-type]
    ):
        pass
