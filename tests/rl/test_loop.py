"""The RL loop: its steps equal plain GRPO on flat sequences, whatever the engine."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.engine.scripted import ScriptedEngine
from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from tests.rl.runs import (
    SAMPLING,
    STOP,
    TinyTask,
    eager,
    options,
    sampling_loop,
    script,
    scripted_loop,
    share_of_even_tokens,
    uneven,
)
from treering import metrics
from treering.config.optim import OptimOptions
from treering.engine.protocol import Request, Rollout, Sampling
from treering.errors import ConfigError, InputError, StateError
from treering.rl.drafting import Drafting
from treering.rl.tasks.task import Prompt

EXACT = 1e-10


def expected_group(prompt: Prompt, draw: int, size: int = 4) -> list[list[int]]:
    """Return the rollouts that the script writes for one group."""
    return [
        script(Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=SAMPLING, draw=draw, sample=sample))
        for sample in range(size)
    ]


def share_even(tokens: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def flat_loss(
    model: nn.Module, groups: list[tuple[Prompt, list[list[int]]]], temperature: float, cap: float | None
) -> Tensor:
    """Return a reference GRPO loss: the mean over rollouts of their mean clipped terms, with the stock forward."""
    means = []
    for prompt, rollouts in groups:
        rewards = torch.tensor([share_even(tokens) for tokens in rollouts], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for tokens, advantage in zip(rollouts, advantages, strict=True):
            logprobs, _ = flat_logprobs(model, [*prompt.tokens.tolist(), *tokens], temperature)
            ids = torch.tensor(tokens)
            old, behaviour = (-2.0 - (ids % size).double() / 2 for size in (5, 3))
            ratio = (logprobs[prompt.tokens.size - 1 :] - old).exp()
            terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            weights = 1.0 if cap is None else (old - behaviour).exp().clamp(max=cap)
            means.append((weights * terms).mean())
    return torch.stack(means).mean()


def gradients_after_a_step(**changes: object) -> dict[str, Tensor]:
    loop = scripted_loop(build_float64(), optim=OptimOptions(learning_rate=1e-2, max_grad_norm=0.0), **changes)
    loop.step()
    return take_gradients(loop.model)


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (1.0, 1.1)])
def test_steps_are_those_of_plain_grpo_on_flat_sequences(temperature: float, cap: float | None) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature)
    loop = scripted_loop(build_float64(), sampling=sampling, max_importance=cap)
    model, prompts, draws = build_float64(), TinyTask().prompts, [0] * 5
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    for step in range(1, 6):
        chosen = loop.step_tasks.tasks_of(step)
        loss = flat_loss(model, [(prompts[i], expected_group(prompts[i], draws[i])) for i in chosen], temperature, cap)
        for i in chosen:
            draws[i] += 1
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).norm()
        for weight in model.parameters():
            weight.grad *= min(1.0, float(0.5 / norm))
        optimizer.step()
        report = loop.step()
        assert report.update is not None
        assert report.update.loss == pytest.approx(loss.item(), rel=EXACT, abs=1e-12)
        assert report.update.grad_norm == pytest.approx(norm.item(), rel=EXACT)
    assert sorted(draws) == [1, 2, 2, 2, 2]
    for name, weight in model.named_parameters():
        torch.testing.assert_close(loop.model.get_parameter(name), weight, rtol=0, atol=EXACT)


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_both_layouts_give_the_same_gradients(objective: str) -> None:
    packed = gradients_after_a_step(layout="packed", objective=objective)
    assert_gradients_equal(packed, gradients_after_a_step(layout="tree", objective=objective), EXACT)


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "dr_grpo"},
        {"estimator": "rloo"},
        {"objective": "dapo"},
        {"objective": "dr_grpo"},
        {"objective": "gspo"},
        {"objective": "cispo"},
        {"objective": "rloo"},
        {"entropy_coefficient": 0.1},
        {"normalizer": 50.0},
        {"normalizer": "tree_mean"},
        {"clip": (0.01, 0.02)},
        {"max_importance": 1.01},
        {"group_size": 3},
        {"prompts_per_step": 1},
        {"seed": 1},
        {"sampling": Sampling(max_tokens=6)},
        {"sampling": Sampling(max_tokens=12, temperature=0.5)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_an_option_reaches_the_gradient(changes: dict[str, object]) -> None:
    plain, other = gradients_after_a_step(), gradients_after_a_step(**changes)
    assert max(float((plain[name] - other[name]).abs().max()) for name in plain) > 1e-6


def test_groups_with_equal_rewards_leave_every_denominator() -> None:
    def reward(rollout: Rollout) -> float:
        return 1.0 if rollout.prompt_id == "p1" else share_of_even_tokens(rollout)

    with_flat = scripted_loop(build_float64(), TinyTask(2, reward), prompts_per_step=2)
    report = with_flat.step()
    alone = scripted_loop(build_float64(), TinyTask(1, reward), prompts_per_step=1)
    expected = alone.step()
    assert report.update is not None
    assert expected.update is not None
    assert (report.rollouts.num_zero_variance, report.rollouts.num_groups, report.update.num_trees) == (1, 2, 1)
    assert report.update.loss == pytest.approx(expected.update.loss, rel=EXACT)
    assert report.update.num_branches == 4
    assert report.values()[metrics.ZERO_VARIANCE_SHARE] == 0.5
    assert [row.advantage == 0.0 for row in with_flat.latest] == [row.task_id == "p1" for row in with_flat.latest]


def test_a_step_with_equal_rewards_changes_no_weight_and_is_reported() -> None:
    loop = scripted_loop(task=TinyTask(reward=lambda rollout: 0.25), drafting=Drafting())
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    engine = loop.engine
    report = loop.step()
    assert (report.update, report.rollouts.num_zero_variance) == (None, 2)
    # Its caches would round differently from those of a resumed run, which begins without.
    assert loop.engine is not engine
    assert (loop.version, loop.engine.version, loop.num_steps_done) == (0, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
    values = report.values()
    assert metrics.LOSS not in values
    assert (values[metrics.REWARD_MEAN], values[metrics.REWARD_STD]) == (0.25, 0.0)


def test_a_report_counts_what_the_step_did() -> None:
    loop = scripted_loop()
    report = loop.step()
    prompts = [TinyTask().prompts[i] for i in loop.step_tasks.tasks_of(1)]
    flat = [(prompt.tokens.tolist(), tokens) for prompt in prompts for tokens in expected_group(prompt, 0)]
    rewards = [share_even(tokens) for _, tokens in flat]
    assert (report.step, report.epoch, report.version) == (1, 0, 0)
    assert report.rollouts.reward_mean == pytest.approx(np.mean(rewards))
    assert report.rollouts.reward_std == pytest.approx(np.std(rewards))
    num_sampled = sum(len(tokens) for _, tokens in flat)
    assert report.engine.num_sampled == report.rollouts.num_tokens == num_sampled
    assert report.update is not None
    assert report.update.num_branch_tokens == sum(len(prompt) + len(tokens) for prompt, tokens in flat)
    prefixes = {(*prompt, *tokens)[: i + 1] for prompt, tokens in flat for i in range(len(prompt) + len(tokens))}
    assert report.update.num_tokens == len(prefixes)
    values = report.values()
    assert values[metrics.SHARING] == pytest.approx(1 - len(prefixes) / report.update.num_branch_tokens)
    assert values[metrics.LENGTH_MEAN] == pytest.approx(num_sampled / 8)
    assert values[metrics.SAMPLED_PER_S] == pytest.approx(num_sampled / values[metrics.ROLLOUT_S])
    phases = report.phases
    assert phases.step_s == pytest.approx(phases.rollout_s + phases.train_s + phases.update_s)
    names = {getattr(metrics, name) for name in dir(metrics) if name.isupper()}
    assert {name for name in values if name not in names} == {
        f"train/{name}" for name in ("ratio", "approx_kl", "clip_low", "clip_high")
    }


def test_versions_and_draws_rise_and_latest_tells_them() -> None:
    loop = scripted_loop(prompts_per_step=5)
    for epoch in range(3):
        report = loop.step()
        assert (report.epoch, report.version, loop.version, loop.engine.version) == (epoch, epoch, epoch + 1, epoch + 1)
        assert {(row.step, row.epoch, row.version) for row in loop.latest} == {(epoch + 1, epoch, epoch)}
        assert [(row.task_id, row.trial) for row in loop.latest] == [
            (f"p{i}", sample) for i in loop.step_tasks.tasks_of(epoch + 1) for sample in range(4)
        ]
        row = loop.latest[0]
        prompt = next(prompt for prompt in TinyTask().prompts if prompt.prompt_id == row.task_id)
        assert row.tokens is not None
        assert row.tokens.tolist() == [*prompt.tokens.tolist(), *expected_group(prompt, draw=epoch)[0]]


def test_drafts_change_speed_and_no_token() -> None:
    drafting, plain = sampling_loop(build_float64(), eager()), sampling_loop(build_float64())
    for _ in range(6):
        ours, theirs = drafting.step(), plain.step()
        assert [row.tokens.tolist() for row in drafting.latest] == [row.tokens.tolist() for row in plain.latest]  # type: ignore[union-attr]
    assert ours.engine.num_drafted > 0
    assert (theirs.engine.num_drafted, theirs.engine.tokens_per_forward) == (0, 1.0)


def test_rollouts_are_remembered_by_prompt_and_version() -> None:
    drafting = Drafting()
    loop = scripted_loop(prompts_per_step=5, drafting=drafting)
    for _ in range(3):
        loop.step()
    texts = drafting.store.snapshot["p1"].texts()
    # Two epochs are kept; a marker stands before each rollout.
    assert sorted(texts) == [1, 2]
    prompt = TinyTask().prompts[1]
    assert texts[2].tolist() == [token for tokens in expected_group(prompt, draw=2) for token in (-1, *tokens)]


def test_the_engine_gets_the_drafter_and_the_restored_version() -> None:
    made: list[tuple[object, int]] = []

    def make_engine(drafter: object, version: int) -> ScriptedEngine:
        made.append((drafter, version))
        return uneven(None, version)

    first = scripted_loop(make_engine=make_engine, drafting=Drafting())
    assert made == []
    for _ in range(3):
        first.step()
    assert len(made) == 1
    drafting = Drafting()
    second = scripted_loop(make_engine=make_engine, drafting=drafting)
    second.load_state(copy.deepcopy(first.state()))
    assert second.engine.version == first.version == 3
    assert made[1] == (drafting.drafter, 3)


def test_training_has_its_own_number_of_threads() -> None:
    loop = scripted_loop(num_train_threads=1)
    seen: list[int] = []
    loop.model.get_parameter("model.norm.weight").register_hook(lambda gradient: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loop.step()
        assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


def test_an_invalid_loop_is_refused_before_the_first_step() -> None:
    with pytest.raises(InputError, match="at least one prompt, and the task has none"):
        scripted_loop(task=TinyTask(0))
    with pytest.raises(InputError, match="'a' repeats one"):
        scripted_loop(task=TinyTask(3, names=("a", "b", "a")))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"group_size": 1}, "group_size: expected greater than or equal to 2, got 1"),
        *(
            ({name: 0}, f"{name}: expected greater than or equal to 1, got 0")
            for name in ("prompts_per_step", "num_train_threads", "num_iterations", "num_minibatches")
        ),
        ({"max_gen_batches": 0}, "max_gen_batches: expected greater than or equal to 1, got 0"),
        ({"overlong_buffer": 13}, r"sampling\.max_tokens = 12, got 13"),
        ({"clip": (2.0, 0.2)}, "clip.0: expected less than or equal to 1"),
        ({"objective": "ppo"}, "an objective of rollouts must be one of .*, got 'ppo'; it needs a value head"),
        ({"layout": "packed", "normalizer": "tree_mean"}, 'one tree per task, got layout = "packed"'),
        ({"estimator": "gae"}, "estimator: expected 'grpo', 'dr_grpo' or 'rloo', got 'gae'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        options(**changes)


@pytest.mark.parametrize(("stops", "expected"), [((), [9, 5, STOP]), ((5,), [9, 5]), ((STOP,), [9, 5, STOP])])
def test_both_the_task_s_and_the_user_s_stops_end_a_rollout(stops: tuple[int, ...], expected: list[int]) -> None:
    loop = scripted_loop(
        make_engine=lambda drafter, version: ScriptedEngine(lambda request: [9, 5, STOP, 8, 8], version=version),
        sampling=Sampling(max_tokens=12, stop_tokens=stops),
    )
    loop.step()
    for row in loop.latest:
        assert row.tokens is not None
        assert row.tokens[row.loss_mask].tolist() == expected


def test_rewards_of_any_size_train_without_a_warning() -> None:
    # Any warning of numpy is an error in the tests.
    loop = scripted_loop(task=TinyTask(2, lambda rollout: 1.7e308 * share_of_even_tokens(rollout)))
    other = scripted_loop(task=TinyTask(2, lambda rollout: 1e-3 * share_of_even_tokens(rollout)))
    report = loop.step()
    assert report.update is not None
    assert report.rollouts.reward_mean == pytest.approx(1.7e308 * (other.step().rollouts.reward_mean or 0) / 1e-3)
    assert report.rollouts.reward_std is not None
    assert 0 < report.rollouts.reward_std < 1.7e308
    # Undivided, they are too large for float32.
    with pytest.raises(StateError, match="finite"):
        scripted_loop(
            task=TinyTask(2, lambda rollout: 1e300 * share_of_even_tokens(rollout)), estimator="dr_grpo"
        ).step()


class Unknowing(ScriptedEngine):
    """Engine that gives no log-probs of the policy."""

    def step(self) -> list[Rollout]:
        return [replace(rollout, policy_logprobs=np.full(rollout.num_tokens, np.nan)) for rollout in super().step()]


def test_unknown_policy_logprobs_are_refused_or_recomputed_and_reach_no_loss() -> None:
    make_engine = lambda _, version: Unknowing(script, max_batch=3, version=version)  # noqa: E731
    model = build()
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(StateError, match=r"gave none for \d+ tokens; set old_logprobs=\"recomputed\""):
        scripted_loop(model, make_engine=make_engine).step()
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
    report = scripted_loop(model, make_engine=make_engine, old_logprobs="recomputed").step()
    assert report.update is not None
    assert np.isfinite(report.update.loss)


def test_recomputed_old_logprobs_are_those_of_the_weights_before_the_update() -> None:
    """The gradient is that of ratios 1: the same as with the engine's, where these are the model's."""
    sampled, recomputed = (sampling_loop(old_logprobs=name) for name in ("sampled", "recomputed"))
    for loop in (sampled, recomputed):
        assert loop.step().update is not None
    for left, right in zip(sampled.model.parameters(), recomputed.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-4)


def test_a_loop_tells_rollouts_first_and_then_tokens_and_trains_to_the_same_bits() -> None:
    calls: list[tuple[str, int, int]] = []
    heard, no_warnings = scripted_loop(max_batch_tokens=8), scripted_loop(max_batch_tokens=8)
    heard.on_progress = lambda *call: calls.append(call)
    report = heard.step()
    no_warnings.step()
    sampled = [call for call in calls if call[0] == "sampling"]
    # Reported again at every step of the engine.
    assert list(dict.fromkeys(sampled)) == [("sampling", done, 8) for done in range(9)]
    assert report.update is not None
    size = report.update.num_tokens
    trained = calls[len(sampled) :]
    assert (trained[0], trained[-1]) == (("training", 0, size), ("training", size, size))
    assert len(trained) == report.update.num_micro_batches + 1
    weights = no_warnings.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in heard.model.state_dict().items())


def test_a_step_with_no_rollout_at_all_is_reported_without_rewards() -> None:
    loop = scripted_loop(make_engine=lambda drafter, version: ScriptedEngine(lambda request: [], version=version))
    report = loop.step()
    assert (report.rollouts.num_rollouts, report.rollouts.num_empty, report.rollouts.num_empty_groups) == (0, 8, 2)
    assert report.rollouts.reward_mean is None
    assert metrics.REWARD_MEAN not in report.values()
    assert report.update is None


def test_a_step_whose_gradient_is_not_finite_moves_no_weight_and_no_version() -> None:
    loop = scripted_loop()
    loop.step()
    with torch.no_grad():
        loop.model.get_parameter("model.norm.weight")[0] = math.nan
    with pytest.raises(StateError, match="finite gradients"):
        loop.step()
    assert (loop.num_steps_done, loop.version, loop.engine.version) == (1, 1, 1)


def test_the_engine_samples_with_the_trained_weights() -> None:
    loop = sampling_loop()
    for _ in range(2):
        loop.step()
    weights = copy.deepcopy(loop.model)
    loop.step()
    row = loop.latest[0]
    assert row.tokens is not None
    assert row.logprobs is not None
    assert row.loss_mask is not None
    with torch.no_grad():
        logprobs, _ = flat_logprobs(weights, row.tokens.tolist())
    sampled = row.loss_mask[1:]
    np.testing.assert_allclose(row.logprobs[1:][sampled], logprobs.numpy()[sampled], rtol=0, atol=1e-5)
