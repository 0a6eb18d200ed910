"""A server that drafts: 64 clients at once get the tokens of greedy decoding, and TRL trains with it.

Slow, because a start takes a minute. Each test starts its own server: with a history that others have filled, it would
draft from the start.
"""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.integrations.vllm.llms import VOCAB, K, greedy
from tests.integrations.vllm.servers import asked, served_as_documented
from treering.history.store.store import HistoryStore
from treering.types import hash_of_prompt

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


NUM_CLIENTS, PROMPT_SIZE, NUM_TOKENS = 64, 20, 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a saved model."""
    from tests.integrations.vllm import trl_on_cpu as helpers

    helpers.save_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def prompts_and_answers(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers for 64 clients; every second answer is in the history."""
    prompts = np.random.default_rng(0).integers(2, VOCAB, (NUM_CLIENTS, PROMPT_SIZE)).tolist()
    answers = greedy(folder / "model", prompts, NUM_TOKENS)
    with HistoryStore(folder / "history") as store:
        for prompt, answer in list(zip(prompts, answers, strict=True))[::2]:
            store.add(hash_of_prompt(prompt), [np.array(answer, np.int32)], version=0)
        store.publish()
    return prompts, answers


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """Yield the address of a server that is started as documented."""
    with served_as_documented(folder, folder / "model", K) as address:
        yield address


def test_64_clients_at_once_get_the_tokens_of_greedy_decoding(
    prompts_and_answers: Any, server: str, folder: Path
) -> None:
    prompts, answers = prompts_and_answers

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": str(folder / "model"), "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = asked(f"{server}/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        found: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        assert list(clients.map(ask, prompts)) == answers
    counts = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", asked(f"{server}/metrics"), re.MULTILINE
    )
    # Half of the clients' answers were in the history.
    assert sum(map(float, counts)) > 0.7 * NUM_CLIENTS / 2 * NUM_TOKENS


def update(client: Any, metadata: Any, named: Any) -> None:
    """Load new weights from a file instead of by NCCL."""
    from safetensors.torch import save_file

    folder = Path(os.environ["TREERING_TEST_WEIGHTS"])
    folder.mkdir(exist_ok=True)
    save_file({name: weight.detach().clone() for name, weight in named}, folder / "model.safetensors")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    client.session.post(f"{client.base_url}/collective_rpc", json=body).raise_for_status()


def test_a_served_policy_drafts_from_the_run_s_history_and_follows_its_weights(
    server: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation.vllm_client import VLLMClient

    from tests.integrations.vllm import trl_on_cpu as helpers
    from tests.integrations.vllm.llms import build, logprobs_of, z_of
    from treering.errors import ConfigError
    from treering.integrations.trl import share_prefixes, vllm_drafts

    monkeypatch.setenv("TREERING_TEST_WEIGHTS", str(folder / "weights"))
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_server_timeout": 500.0}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(VLLMClient, "init_communicator"))
        stack.enter_context(mock.patch.object(VLLMClient, "update_named_params", update))
        with (
            pytest.raises(ConfigError, match=r"drafts from the history .*history, but this run records to .*other"),
            vllm_drafts(folder / "other"),
        ):
            helpers.make_trainer(folder / "model", folder / "out", **options)
        with vllm_drafts(folder / "history"):
            trainer = helpers.make_trainer(folder / "model", folder / "out", **options)
        calls = helpers.Calls(trainer)
        share_prefixes(trainer)
        trainer.train()
    logs = trainer.state.log_history[:3]
    gained = [log["rollout/tokens_per_forward"] for log in logs]
    assert gained[0] > 1.0
    assert min(gained[1:]) > gained[0]
    for call, log in zip(calls.found, logs, strict=True):
        policy = build(tied=False)
        policy.load_state_dict(call.policy)
        policy.double()
        for row in range(0, len(call.prompts), 16):
            expected = logprobs_of(policy, call.prompts[row], call.completions[row])
            np.testing.assert_allclose(np.array(call.answer[2][row])[:, 0], expected, atol=1e-4)
        assert abs(z_of(policy, call.prompts, call.completions)) < 4
        assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-4)
