"""`treering train` with engine.kind = "vllm", from the command line to the checkpoint, and in rollout workers."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cli.runs import metrics_of, started
from tests.cli.train.test_command import prompts
from tests.cli.train.test_processes import REWARD
from tests.integrations.vllm.llms import logprobs_of
from treering.data import read_trajectories
from treering.train.loop.checkpoint import STATE_FILE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")

GROUP_SIZE, PROMPTS_PER_STEP, NUM_PROMPTS = 3, 2, 5
SETTINGS = (
    *("engine.kind=vllm", "engine.verification=exact", "engine.max_batch=8", "history.max_draft=8"),
    *("model.hidden_size=64", "model.num_layers=2"),
    *("sampling.max_tokens=24", "rl.num_steps=3", "run.dir=out", "run.save_every=1"),
)


def train(path: Path, *overrides: str) -> dict[str, Any]:
    """Return the JSON summary of `treering train` in its own process, which imports numba before it starts vLLM."""
    process = started(path.parents[1], "train", str(path), *SETTINGS, *overrides, "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err[-4000:]
    summary: dict[str, Any] = json.loads(out)
    return summary


def test_a_run_drafts_learns_and_resumes(tmp_path: Path) -> None:
    path = prompts(tmp_path, REWARD)
    summary = train(path)
    assert summary["total"]["num_updates"] == 3
    rows = metrics_of(tmp_path / "out")
    assert [row["rollout/version"] for row in rows] == [0, 1, 2]
    assert sum(row["rollout/num_drafted"] * row["rollout/acceptance"] for row in rows) > 0
    # vLLM sampled step 3 with the trainer's weights after step 2.
    last = tmp_path / summary["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(last.with_name(last.name.replace("3", "2")))
    rollouts = [t for file in (tmp_path / "out" / "rollouts").iterdir() for t in read_trajectories(file) if t.step == 3]
    assert len(rollouts) == GROUP_SIZE * (NUM_PROMPTS - 2 * PROMPTS_PER_STEP)
    for rollout in rollouts:
        first = int(np.argmax(rollout.loss_mask))
        expected = logprobs_of(model, rollout.tokens[:first], rollout.tokens[first:])
        np.testing.assert_allclose(rollout.logprobs[first:], expected, atol=2e-5)
    # The checkpoint has the state of the drafter inside vLLM, which has learnt.
    saved = torch.load(last / STATE_FILE, weights_only=True)
    state = saved["loop"]["drafter"]
    assert any(bool(values.any()) for values in state.values())
    resumed = train(path, "rl.num_steps=4")
    assert (resumed["resumed_from_step"], resumed["num_steps"]) == (3, 4)


@pytest.mark.slow
def test_a_killed_worker_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL to a worker with vLLM inside, every rollout is sampled and trained once, and vLLM ends too."""
    pytest.importorskip("ray")
    # Imported here: numba must not be loaded before the LLMs of other tests start in this process.
    from rich.console import Console

    from tests.runtime.kills import killing
    from treering.cli.train import train as run
    from treering.config import RlConfig
    from treering.config.record import load

    path = prompts(tmp_path, REWARD)
    monkeypatch.chdir(tmp_path)
    config = load(RlConfig, path, [*SETTINGS, "runtime.workers=1", "rl.staleness=1", "rl.num_steps=4"])
    before = vllm_processes()
    with killing({6: "rollout worker 0"}) as dead:
        summary = run(config, config_dir=path.parent, console=Console(quiet=True))
    assert dead == ["rollout worker 0"]
    account = summary.account
    assert account is not None
    num_rollouts = GROUP_SIZE * (2 * PROMPTS_PER_STEP + (NUM_PROMPTS - 2 * PROMPTS_PER_STEP) + PROMPTS_PER_STEP)
    assert account["scheduled"] == account["sampled"] == account["evaluated"] == num_rollouts
    left_out = account["without_variance"] + account["reward_errors"] + account["empty"]
    assert account["trained"] + left_out == num_rollouts
    assert account["worker_deaths"] == 1
    assert wait_for_the_end_of(vllm_processes() - before)


def vllm_processes() -> set[int]:
    """Return processes whose name is vLLM's."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"VLLM::"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def wait_for_the_end_of(pids: set[int], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while pids & vllm_processes() and time.monotonic() < end_s:
        time.sleep(0.1)
    return not pids & vllm_processes()
