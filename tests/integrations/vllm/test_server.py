"""`vllm serve` with drafts gives 64 clients at once the tokens of greedy decoding."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treering.history.store.store import HistoryStore
from treering.types import hash_of_prompt

pytestmark = pytest.mark.slow

NUM_CLIENTS, PROMPT_SIZE, NUM_TOKENS = 64, 20, 40


@pytest.fixture
def model_and_answers(tmp_path: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A saved model, a prompt for each client, and Hugging Face's greedy continuations."""
    pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")
    from transformers import Qwen3ForCausalLM

    from tests.integrations.vllm.worded import VOCAB, save_worded_model

    folder = tmp_path / "model"
    save_worded_model(folder)
    prompts = np.random.default_rng(0).integers(1, VOCAB, (NUM_CLIENTS, PROMPT_SIZE)).tolist()
    ids = torch.tensor(prompts)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return folder, prompts, ids[:, PROMPT_SIZE:].tolist()


@pytest.fixture
def server(model_and_answers: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a server whose history has every second client's answer."""
    folder, prompts, answers = model_and_answers
    with HistoryStore(tmp_path / "history") as store:
        for prompt, answer in list(zip(prompts, answers, strict=True))[::2]:
            store.add(hash_of_prompt(prompt), [np.array(answer, np.int32)], version=0)
        store.publish()
    drafts = {
        "method": "custom_class", "num_speculative_tokens": 8,
        "model": "treering.integrations.vllm.HistoryProposer",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        # What `vllm serve` runs; the command itself asks for a package named vllm, and the CPU build has another name.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--kv-cache-memory-bytes", str(1 << 25),
        "--speculative-config", json.dumps(drafts),
    ]  # fmt: skip
    environment = {
        **os.environ, "TREERING_HISTORY": str(tmp_path / "history"), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, address, tmp_path / "log")
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: Any, address: str, log: Path, most_s: float = 500.0) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            _get(f"{address}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-3000:])


def _get(address: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def test_64_clients_at_once_get_the_tokens_of_greedy_decoding(server: str, model_and_answers: Any) -> None:
    folder, prompts, answers = model_and_answers

    def ask(prompt: list[int]) -> list[int]:
        body = {
            "model": str(folder), "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        found: list[int] = json.loads(_get(f"{server}/v1/completions", body))["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        assert list(clients.map(ask, prompts)) == answers
    counts = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", _get(f"{server}/metrics"), re.M)
    # Half of the clients' answers were in the history.
    assert sum(map(float, counts)) > 0.7 * NUM_CLIENTS / 2 * NUM_TOKENS
