"""`vllm serve` with drafts gives 64 clients at once the tokens of greedy decoding."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integrations.vllm.servers import asked, served
from treering.history.store.store import HistoryStore
from treering.types import hash_of_prompt

pytestmark = pytest.mark.slow

NUM_CLIENTS, PROMPT_SIZE, NUM_TOKENS = 64, 20, 40


def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's greedy continuations."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    found: list[list[int]] = ids[:, PROMPT_SIZE:].tolist()
    return found


def test_64_clients_at_once_get_the_tokens_of_greedy_decoding(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")
    from tests.integrations.vllm.worded import VOCAB, save_worded_model

    folder = tmp_path / "model"
    save_worded_model(folder)
    prompts = np.random.default_rng(0).integers(1, VOCAB, (NUM_CLIENTS, PROMPT_SIZE)).tolist()
    answers = greedy(folder, prompts)
    with HistoryStore(tmp_path / "history") as store:
        for prompt, answer in list(zip(prompts, answers, strict=True))[::2]:
            store.add(hash_of_prompt(prompt), [np.array(answer, np.int32)], version=0)
        store.publish()

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": str(folder), "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = asked(f"{server}/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        found: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        return found

    with served(folder, tmp_path / "history", 8) as server, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        assert list(clients.map(ask, prompts)) == answers
        metrics = asked(f"{server}/metrics")
    counts = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", metrics, re.M)
    # Half of the clients' answers were in the history.
    assert sum(map(float, counts)) > 0.7 * NUM_CLIENTS / 2 * NUM_TOKENS
