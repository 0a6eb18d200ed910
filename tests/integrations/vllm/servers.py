"""Run `vllm serve` in its own process, for tests that ask it over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from treering.integrations.vllm.llm import EXTENSION
from treering.integrations.vllm.vllm_settings import speculative_config

ROOT = Path(__file__).parents[3]


def plugins(folder: Path) -> None:
    """Write a distribution with the entry points of `pyproject.toml`, and one that corrects vLLM's sampling on CPU."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    points = {**points, "right_sampling": "tests.integrations.vllm.shim:register"}
    info = folder / "plugins-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 0.1\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{lines}")


@contextmanager
def served(model: Path, history: Path, max_draft: int, *flags: str, paths: tuple[Path, ...] = ()) -> Iterator[str]:
    """Yield the address of a server that drafts from a history; `paths` are added to its import path."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        # The command itself looks for a distribution named vllm, but the CPU build has another name.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--speculative-config", json.dumps(speculative_config(max_draft)), *flags),
    ]
    environment = os.environ | {
        "TREERING_HISTORY": str(history),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, *paths))),
    }
    address, file = f"http://127.0.0.1:{port}", model.with_name("server.log")
    with file.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, address, file)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            # It ignores signals while it starts, and killing only the server would leave its processes running.
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def served_as_documented(folder: Path, model: Path, max_draft: int, *flags: str) -> Iterator[str]:
    """Yield the address of a server started as `docs/trl.md` says, plus what CPUs need; `folder` gets its history."""
    plugins(folder / "plugins")
    # vLLM's `/server_info` fails in an environment that uv made if uv is not on the path.
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    documented = [
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--worker-extension-cls", EXTENSION),
        *("--weight-transfer-config", json.dumps({"backend": "nccl"})),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "1024"),
    ]
    search_path = os.pathsep.join((str(uv.parent), os.environ["PATH"]))
    with (
        mock.patch.dict(os.environ, {"PATH": search_path}),
        served(model, folder / "history", max_draft, *documented, *flags, paths=(folder / "plugins",)) as address,
    ):
        yield address


def asked(address: str, body: Any = None) -> str:
    """Return the text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def _wait(process: Any, address: str, log: Path, most_s: float = 500.0) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end and process.poll() is None:
        try:
            asked(f"{address}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])
