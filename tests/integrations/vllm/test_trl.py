"""TRL's vLLM with `share_prefixes`, with drafts and without: the same policy is sampled, the same loss trained.

Three steps of GRPO in this process, with a weight update after each; every step has all prompts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
K = 6


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's calls of vLLM and its logs."""

    calls: Any
    logs: list[dict[str, float]]


@pytest.fixture(scope="module")
def helpers() -> Any:
    from tests.integrations.vllm import trl_on_cpu

    return trl_on_cpu


@pytest.fixture(scope="module")
def model(helpers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = helpers.save_model(tmp_path_factory.mktemp("policy"))
    return folder


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts") / "history"


def train(helpers: Any, model: Path, out: Path, *, history: Path | None) -> Trained:
    from treering.integrations.trl import share_prefixes

    with helpers.trl_on_cpu():
        with helpers.drafts_or_not(history, K):
            trainer = helpers.make_trainer(model, out)
        calls = helpers.Calls(trainer)
        share_prefixes(trainer)
        trainer.train()
    return Trained(calls=calls.found, logs=trainer.state.log_history[:3])


@pytest.fixture(scope="module")
def drafted(helpers: Any, model: Path, history: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(helpers, model, tmp_path_factory.mktemp("drafted"), history=history)


@pytest.fixture(scope="module")
def plain(helpers: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(helpers, model, tmp_path_factory.mktemp("plain"), history=None)


@pytest.fixture(params=["drafted", "plain"])
def run(request: pytest.FixtureRequest) -> Trained:
    found: Trained = request.getfixturevalue(request.param)
    return found


def policy_of(call: Any) -> torch.nn.Module:
    from tests.integrations.vllm.llms import build

    made = build(tied=False)
    made.load_state_dict(call.policy)
    return made.double()


def test_each_step_samples_the_weights_of_its_step(run: Trained) -> None:
    from tests.integrations.vllm.llms import logprobs_of

    policies = [policy_of(call) for call in run.calls]
    assert len(policies) == 3
    for step, call in enumerate(run.calls):
        for row in range(0, len(call.prompts), 16):
            given = np.array(call.answer[2][row])[:, 0]
            of = [logprobs_of(policy, call.prompts[row], call.completions[row]) for policy in policies]
            np.testing.assert_allclose(given, of[step], atol=1e-4)
            # A missed update, by drafts or the prefix cache, would differ this much.
            assert all(np.abs(given - of[other]).mean() > 0.02 for other in range(3) if other != step)


def test_the_distribution_is_the_policy_s(run: Trained) -> None:
    from tests.integrations.vllm.llms import z_of

    for call in run.calls:
        assert abs(z_of(policy_of(call), call.prompts, call.completions)) < 4


def test_the_correction_finds_nothing_to_correct(run: Trained) -> None:
    for log in run.logs:
        for bound in ("min", "max"):
            assert log[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx(1.0, abs=1e-4)


def test_drafts_are_in_the_metrics_and_more_are_accepted_when_prompts_come_again(
    drafted: Trained, plain: Trained
) -> None:
    assert not any(name.startswith("rollout/") for log in plain.logs for name in log)
    gained = [log["rollout/tokens_per_forward"] for log in drafted.logs]
    assert all(0 < log["rollout/acceptance"] < 1 for log in drafted.logs)
    assert gained[0] > 1.0
    assert min(gained[1:]) > gained[0]


def test_the_history_has_the_rollouts_of_every_prompt(drafted: Trained, history: Path) -> None:
    from treering.history.store.history_reader import HistoryReader
    from treering.types import hash_of_prompt

    snapshot = HistoryReader(history).snapshot
    newest = drafted.calls[-1]
    assert set(snapshot) == {hash_of_prompt(prompt) for prompt in newest.prompts}
    for prompt in {tuple(prompt) for prompt in newest.prompts}:
        index = snapshot[hash_of_prompt(prompt)]
        expected = [ids for at, ids in zip(newest.prompts, newest.completions, strict=True) if tuple(at) == prompt]
        text = [token for ids in expected for token in [-1, *ids]]
        assert index.versions.tolist() == [2, 1]
        assert index.text[: len(text)].tolist() == text


def test_gradients_and_loss_are_those_of_the_stock_trainer_on_the_same_rollouts(
    helpers: Any, model: Path, drafted: Trained, tmp_path: Path
) -> None:
    from treering.integrations.trl import share_prefixes

    def replay(*, is_shared: bool) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
        trainer = helpers.make_trainer(model, tmp_path, calls=drafted.calls)
        # Rounding of this policy in float32 moves its gradients by 1e-5.
        trainer.model.double()
        recorder = helpers.runs.Recorder()
        trainer.add_callback(recorder)
        if is_shared:
            # TRL's head still computes in float32, which the check would report as an error in float64.
            share_prefixes(trainer, verify_first=False)
        trainer.train()
        return recorder.gradients, [log["loss"] for log in trainer.state.log_history[:3]]

    (stock, losses), (shared, found) = replay(is_shared=False), replay(is_shared=True)
    assert len(stock) == 3
    assert helpers.runs.apart(shared, stock) < 1e-6
    assert found == pytest.approx(losses, abs=1e-6)
