"""Held-out rewards: pass@k of a policy whose chances are known exactly, and no effect on training."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import build
from tests.rl.runs import TinyTask, eager, memory_of, sampling_loop, steps_in
from treering.engine.protocol import Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError
from treering.metrics import METRICS_FILE
from treering.rl.evaluation import EvalOptions, HeldOutRewards, eval_seed, mean_pass_at_k, pass_at_k
from treering.rl.loop import RlLoop
from treering.train.loop.held_out import Evaluation
from treering.train.loop.saved_run import knows_first


def test_pass_at_k_is_the_share_of_the_subsets_of_k_samples_with_one_that_passed() -> None:
    from itertools import combinations

    for n in range(1, 6):
        for c, k in product(range(n + 1), range(1, n + 1)):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert list(mean_pass_at_k(6, [0, 3])) == [1, 2, 4]
    assert mean_pass_at_k(6, [0, 3])[2] == pytest.approx(pass_at_k(6, 3, 2) / 2)


def one_even_token(rollout: Rollout) -> float:
    return float(rollout.tokens[0] % 2 == 0)


def test_the_estimate_agrees_with_the_exact_chances_of_the_model() -> None:
    model, task, num_samples = build().eval(), TinyTask(5, one_even_token), 256
    chances = []
    for prompt in task.prompts:
        with torch.no_grad():
            logits = model(torch.from_numpy(prompt.tokens).long()[None]).logits[0, -1].double()
        chances.append(float(logits.softmax(0)[::2].sum()))
    options = EvalOptions(sampling=Sampling(max_tokens=1), num_samples=num_samples)
    report = HeldOutRewards(task, lambda: engine_of(model), options)()
    # Four standard deviations of the mean over all samples; later k are less uncertain.
    bound = 4 * np.sqrt(np.mean([p * (1 - p) for p in chances]) / (num_samples * len(chances)))
    for k in (1, 2, 4):
        exact = np.mean([1 - (1 - p) ** k for p in chances])
        assert report.pass_at[k] == pytest.approx(exact, abs=k * bound)
    assert report.reward == report.pass_at[1]
    assert list(report.pass_at) == [1 << bits for bits in range(9)]


def test_a_rollout_whose_reward_raises_does_not_pass_and_is_counted() -> None:
    def reward(rollout: Rollout) -> float:
        if rollout.sample == 0:
            raise ValueError("no parser")
        return 2.0

    options = EvalOptions(sampling=Sampling(max_tokens=1), num_samples=2)
    values = HeldOutRewards(TinyTask(3, reward), lambda: engine_of(build()), options)().values()
    assert values["eval/reward"] == 2.0
    assert (values["eval/pass_at_1"], values["eval/pass_at_2"]) == (0.5, 1.0)
    assert values["eval/num_reward_errors"] == 3
    strict = EvalOptions(sampling=Sampling(max_tokens=1), pass_reward=2.5)
    assert HeldOutRewards(TinyTask(3, lambda _: 2.0), lambda: engine_of(build()), strict)().pass_at == {1: 0.0}
    with pytest.raises(ConfigError, match="num_samples"):
        EvalOptions(sampling=Sampling(max_tokens=1), num_samples=0)


def test_evaluation_has_its_own_noise() -> None:
    model, task, seen = build(), TinyTask(1), []
    task.reward = lambda prompt, rollout: float(len(seen.append(rollout.tokens.tolist()) or []))  # type: ignore[method-assign,func-returns-value]
    options = EvalOptions(sampling=Sampling(max_tokens=8), num_samples=8)
    for seed in (0, eval_seed(0)):
        HeldOutRewards(task, lambda seed=seed: engine_of(model, seed), options)()  # type: ignore[misc]
    assert not any(ours == theirs for ours, theirs in zip(seen[:8], seen[8:], strict=True))


def engine_of(model: torch.nn.Module, seed: int = 5) -> TorchEngine:
    return TorchEngine(model, max_batch=8, max_tokens=200, num_threads=1, costs="none", seed=seed)


def train(folder: Path, *, evaluates: bool, stop_after: int | None = None) -> tuple[RlLoop, list[list[int]]]:
    """Train four steps with drafts, or fewer; return the loop and every rollout that this call trained."""
    drafting = eager()
    loop, rollouts = sampling_loop(drafting=drafting), []
    options = EvalOptions(sampling=Sampling(max_tokens=12), num_samples=2)
    # Prompts of the run itself: their history must not learn from the evaluation.
    held = TinyTask().subset(TinyTask().prompts[1:3])
    measure = HeldOutRewards(held, lambda: engine_of(loop.policy(), eval_seed(0)), options)
    evaluation = Evaluation(measure=lambda hears: measure(hears).values(), every=1, knows_first=knows_first(folder))
    for report in steps_in(folder, loop, 4, save_every=2, evaluation=evaluation if evaluates else None):
        rollouts += [each.tokens.tolist() for each in loop.latest if each.tokens is not None]
        if report.step == stop_after:
            break
    return loop, rollouts


def evaluated(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row]


def test_evaluation_changes_no_bit_of_weights_rollouts_and_history_also_over_a_resume(tmp_path: Path) -> None:
    plain, rollouts = train(tmp_path / "plain", evaluates=False)
    whole, same_rollouts = train(tmp_path / "whole", evaluates=True)
    train(tmp_path / "stopped", evaluates=True, stop_after=3)
    resumed, _ = train(tmp_path / "stopped", evaluates=True)
    assert same_rollouts == rollouts
    for loop in (whole, resumed):
        ours, theirs = loop.model.state_dict(), plain.model.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = memory_of(whole._drafting), memory_of(plain._drafting)  # type: ignore[arg-type]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [step for step, _ in evaluated(tmp_path / "whole")] == [0, 1, 2, 3, 4]
    assert evaluated(tmp_path / "stopped") == evaluated(tmp_path / "whole")
