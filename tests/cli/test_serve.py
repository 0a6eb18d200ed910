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
from treering.cli.serve.run_serve import opened
from treering.cli.serve.serve_options import ServeOptions
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, InputError

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
