"""Several updates a batch, dynamic sampling and the length penalty each equal a few lines written by hand."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import build_float64, flat_logprobs
from tests.rl.runs import SAMPLING, TinyTask, sampling_loop, scripted_loop, share_of_even_tokens, steps_in
from tests.train.loop.runs import tensors_of
from treering.config.optim import OptimOptions
from treering.data import Trajectory
from treering.engine.protocol import Rollout
from treering.errors import StateError
from treering.rl.loop import RlLoop
from treering.rl.trainer import Trainer

ADAM = OptimOptions(learning_rate=1e-2, eps=1e-4, max_grad_norm=0.0)


def own_logprobs(model: nn.Module, trajectory: Trajectory) -> Tensor:
    """Return log-probs of the sampled tokens with the stock forward."""
    assert trajectory.tokens is not None
    assert trajectory.loss_mask is not None
    num_prompt = int((~trajectory.loss_mask.astype(bool)).sum())
    return flat_logprobs(model, trajectory.tokens.tolist(), 1.0)[0][num_prompt - 1 :]


def step_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[Trajectory], old: Sequence[Tensor]
) -> None:
    """Make one update by GRPO's clipped loss: the mean over each sequence's tokens and then over sequences."""
    terms = []
    for row, base in zip(rows, old, strict=True):
        assert row.advantage is not None
        ratio = (own_logprobs(model, row) - base).exp()
        terms.append(-torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage).mean())
    optimizer.zero_grad()
    torch.stack(terms).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
@pytest.mark.parametrize(("num_iterations", "num_minibatches"), [(2, 1), (1, 2), (3, 2)])
def test_the_updates_of_a_batch_are_steps_by_hand_whose_ratios_keep_their_base(
    old_logprobs: str, num_iterations: int, num_minibatches: int
) -> None:
    loop = scripted_loop(
        build_float64(),
        optim=ADAM,
        num_iterations=num_iterations,
        num_minibatches=num_minibatches,
        old_logprobs=old_logprobs,
    )
    model = build_float64()
    report = loop.step()
    rows = loop.latest
    if old_logprobs == "sampled":
        # The log-probs that `Uneven` reports.
        tokens = [torch.from_numpy(row.tokens[row.loss_mask.astype(bool)]) for row in rows]
        old = [-2.0 - (own % 5) / 2 for own in tokens]
    else:
        old = [own_logprobs(model, row).detach() for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    parts = pairwise(range(0, len(rows) + 1, len(rows) // num_minibatches))
    for start, stop in [*parts] * num_iterations:
        step_by_hand(model, optimizer, rows[start:stop], old[start:stop])
    for name, weight in model.named_parameters():
        torch.testing.assert_close(loop.model.get_parameter(name), weight, rtol=1e-8, atol=1e-9)
    assert loop.version == 1
    assert report.update is not None
    assert report.update.num_branches == num_iterations * len(rows)


def test_more_parts_than_groups_are_one_group_each() -> None:
    two, many = (scripted_loop(build_float64(), num_minibatches=number) for number in (2, 7))
    two.step()
    many.step()
    assert all(torch.equal(value, tensors_of(many)[name]) for name, value in tensors_of(two).items())


def test_nothing_saves_or_interrupts_between_the_updates_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = scripted_loop(num_iterations=2)
    heard: list[int] = []
    update = loop._trainer._updater.update

    def fails_the_second_time(*args: object, on_progress: object, **named: object) -> object:
        heard.append(on_progress is not None)
        if len(heard) == 2:
            raise StateError("not finite")
        return update(*args, on_progress=on_progress, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(loop._trainer._updater, "update", fails_the_second_time)
    loop.on_progress = lambda *_: None
    with pytest.raises(StateError, match="not finite"):
        loop.step()
    assert heard == [True, False]
    with pytest.raises(StateError, match="between its updates"):
        loop.state()


class Sometimes(TinyTask):
    """Task in which the rewards of some groups are equal."""

    def __init__(self, equal: set[str]) -> None:
        super().__init__(num_prompts=6, reward=lambda rollout: 0.0)
        self._equal = equal

    def reward(self, prompt: object, rollout: Rollout) -> float:
        return 0.0 if rollout.prompt_id in self._equal else share_of_even_tokens(rollout)


def groups_trained(monkeypatch: pytest.MonkeyPatch, loop: RlLoop, num_steps: int) -> list[list[str]]:
    """Return the prompts of the groups with an update, by step."""
    found: list[list[str]] = []
    batch_of = Trainer._scored

    def noting(trainer: Trainer, batch: object, reference: object) -> object:
        found.append([group.prompt.prompt_id for group in batch.trained])  # type: ignore[attr-defined]
        return batch_of(trainer, batch, reference)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_scored", noting)
    for _ in range(num_steps):
        loop.step()
    return found


def test_dynamic_sampling_fills_a_batch_with_the_filtered_list_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Sometimes({"p0", "p3", "p4"})
    loop = scripted_loop(task=task, max_gen_batches=6)
    order = [f"p{i}" for batch in range(1, 40) for i in loop.step_tasks.tasks_of(batch)]
    found = groups_trained(monkeypatch, loop, 4)
    expected, start = [], 0
    for _ in range(4):
        batch, stop = list[str](), start
        while len(batch) < 2:
            batch += [name for name in order[stop : stop + 2] if name not in {"p0", "p3", "p4"}]
            stop += 2
        expected.append(batch[:2])
        start = stop
    assert found == expected
    assert loop.state()["draws"] == {name: order[:start].count(name) for name in order[:start]}


def test_dynamic_sampling_ends_at_its_bound_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = scripted_loop(task=Sometimes({f"p{i}" for i in range(5)}), max_gen_batches=3)
    assert groups_trained(monkeypatch, loop, 1) == [["p5"]]
    nothing = scripted_loop(task=Sometimes({f"p{i}" for i in range(6)}), max_gen_batches=3)
    report = nothing.step()
    assert report.update is None
    assert report.rollouts.num_groups == 6


def test_a_run_with_all_of_it_resumes_bitwise(tmp_path: Path) -> None:
    def loop() -> RlLoop:
        names = {"num_iterations": 2, "num_minibatches": 2, "max_gen_batches": 3, "overlong_buffer": 6}
        return sampling_loop(task=Sometimes({"p1", "p2", "p4"}), **names)

    list(steps_in(tmp_path / "whole", whole := loop(), 5))
    for stop in (2, 3, 5):
        list(steps_in(tmp_path / "parts", parts := loop(), stop))
    assert parts.state()["num_batches"] == whole.state()["num_batches"] > 5
    ours, theirs = tensors_of(parts), tensors_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_long_rollouts_lose_as_in_the_paper_and_reports_keep_the_reward_of_the_task() -> None:
    longest, buffer = SAMPLING.max_tokens, 6
    loop = scripted_loop(
        overlong_buffer=buffer,
        estimator="dr_grpo",
        objective="dr_grpo",
        normalizer=10.0,
    )
    report, rewards = loop.step(), []
    for row in loop.latest:
        length = int(row.loss_mask.sum())
        rewards.append(float((row.tokens[row.loss_mask.astype(bool)] % 2 == 0).mean()))
        # Equation 13 of arXiv 2503.14476; its last case, beyond the longest, cannot be sampled.
        punishment = 0.0 if length <= longest - buffer else ((longest - buffer) - length) / buffer
        rewards[-1] += punishment
    expected = np.array(rewards).reshape(2, 4)
    expected -= expected.mean(1, keepdims=True)
    assert [row.advantage for row in loop.latest] == pytest.approx(expected.ravel().tolist(), abs=1e-12)
    assert report.rollouts.reward_mean == pytest.approx(np.mean([row.reward for row in loop.latest]))


def test_a_penalty_makes_groups_of_equal_rewards_differ() -> None:
    loop = scripted_loop(task=TinyTask(reward=lambda rollout: 1.0), overlong_buffer=8, max_gen_batches=2)
    report = loop.step()
    assert report.update is not None
    assert report.rollouts.num_groups == 2
