"""TRL's vLLM behind a server that drafts from the run's history; slow, as the server's start takes a minute."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.integrations.vllm.llms import EXTENSION, K
from tests.integrations.vllm.servers import plugins, served

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of a server that is started as the documentation says, but for what CPUs need."""
    from tests.integrations.vllm import trl_on_cpu as helpers

    helpers.save_model(folder / "model")
    plugins(folder / "plugins")
    # vLLM's `/server_info` fails in an environment that uv made where no uv is found.
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    flags = [
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--worker-extension-cls", EXTENSION),
        *("--weight-transfer-config", json.dumps({"backend": "nccl"})),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "1024"),
    ]
    place = os.pathsep.join((str(uv.parent), os.environ["PATH"]))
    paths = (folder / "plugins",)
    with (
        mock.patch.dict(os.environ, {"PATH": place}),
        served(folder / "model", folder / "history", K, *flags, paths=paths) as address,
    ):
        yield address


def update(client: Any, metadata: Any, named: Any) -> None:
    """New weights by a file, in the place of NCCL."""
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
            pytest.raises(ConfigError, match=r"drafts from the history .*history, and this run records to .*other"),
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
