"""Collection: order, and failed rollouts. A scripted engine replaces the policy."""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted import ScriptedEngine
from tests.rl.rollouts import prompt_of, rollout_of
from treering.engine.protocol import Request, Rollout, Sampling
from treering.errors import ConfigError, InputError, Interrupted, StateError
from treering.rl.collect import NUM_MESSAGES, Collected, Group, collect, join
from treering.rl.tasks.task import Prompt, RewardValue, Task

STOP = 9
PROMPTS = [prompt_of(1, 2, prompt_id="a"), prompt_of(3, prompt_id="b"), prompt_of(4, prompt_id=7)]
SAMPLING = Sampling(max_tokens=8, stop_tokens=(STOP,))


class Fake(Task):
    """Task with a given reward function."""

    prompts = PROMPTS
    vocab_size = 10
    stop_tokens = (STOP,)

    def __init__(
        self,
        reward: Callable[[Rollout], object] = lambda rollout: float(rollout.num_tokens),
    ) -> None:
        self._reward = reward

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        assert prompt.prompt_id == rollout.prompt_id
        return self._reward(rollout)  # type: ignore[return-value]


def countdown(request: Request) -> list[int]:
    """Return fewer tokens for later samples, so that they finish first."""
    return [request.sample] * (4 - request.sample) + [STOP]


def run(
    script: Callable[[Request], Sequence[int]] = countdown,
    task: Task | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    max_batch: int = 8,
    group_size: int = 3,
    sampling: Sampling = SAMPLING,
    on_finished: Callable[[Rollout], None] | None = None,
) -> Collected:
    engine = ScriptedEngine(script, max_batch=max_batch)
    collected = collect(
        engine,
        task or Fake(),
        prompts,
        {},
        group_size=group_size,
        sampling=sampling,
        on_finished=on_finished,
    )
    assert engine.num_unfinished == 0
    return collected


def tokens_of(collected: Collected) -> list[list[list[int]]]:
    return [[rollout.tokens.tolist() for rollout in group.rollouts] for group in collected.groups]


@pytest.mark.parametrize("max_batch", [1, 2, 8, 64])
def test_groups_follow_the_prompts_and_rollouts_their_samples(max_batch: int) -> None:
    finished: list[tuple[object, int]] = []
    collected = run(max_batch=max_batch, on_finished=lambda r: finished.append((r.prompt_id, r.sample)))
    assert [group.prompt for group in collected.groups] == PROMPTS
    group = [[0, 0, 0, 0, STOP], [1, 1, 1, STOP], [2, 2, STOP]]
    assert tokens_of(collected) == [group] * 3
    assert [group.rewards.tolist() for group in collected.groups] == [[5.0, 4.0, 3.0]] * 3
    expected = [(prompt.prompt_id, sample) for prompt in PROMPTS for sample in range(3)]
    assert sorted(finished, key=expected.index) == expected
    assert (finished == expected) == (max_batch == 1)


def test_requests_carry_draw_prompt_and_sampling() -> None:
    asked: list[Request] = []

    def script(request: Request) -> list[int]:
        asked.append(request)
        return [STOP]

    draws = {"a": 4, 7: 1, "other": 9}
    collected = collect(ScriptedEngine(script), Fake(), PROMPTS, draws, group_size=2, sampling=SAMPLING)
    assert [request.key for request in asked] == [
        (prompt_id, draw, sample) for prompt_id, draw in [("a", 4), ("b", 0), (7, 1)] for sample in range(2)
    ]
    assert [request.prompt.tolist() for request in asked] == [[1, 2]] * 2 + [[3]] * 2 + [[4]] * 2
    assert all(request.sampling is SAMPLING for request in asked)
    assert [rollout.draw for rollout in collected.groups[0].rollouts] == [4, 4]


def location_of(file: str) -> str:
    """Return the path as errors name a file: relative to the current folder, if it is inside."""
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file


def fail_on_sample_1(rollout: Rollout) -> float:
    if rollout.sample == 1:
        raise ZeroDivisionError("by zero")
    return 1.0


@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_reward_that_raises_costs_only_its_rollout(max_batch: int) -> None:
    seen: list[Rollout] = []
    collected = run(task=Fake(reward=fail_on_sample_1), max_batch=max_batch, on_finished=seen.append)
    assert [[rollout.sample for rollout in group.rollouts] for group in collected.groups] == [[0, 2]] * 3
    assert collected.num_reward_errors == 3
    line = fail_on_sample_1.__code__.co_firstlineno + 2
    error = f"{location_of(__file__)}:{line}: ZeroDivisionError: by zero"
    assert collected.reward_errors == tuple(f"prompt {prompt.prompt_id!r}, sample 1: {error}" for prompt in PROMPTS)
    assert collected.error_counts == {error: 3}
    assert len(seen) == 9
    assert {rollout.sample for rollout in seen if rollout.reward is None} == {1}


NO_NUMBERS = [
    *(math.nan, math.inf, -math.inf, "1", b"1", 1j, [1.0], (1.0,), {}, 10**400, Fraction(10**400)),
    *(np.float32("nan"), np.ones(2), np.array("1"), Decimal("sNaN"), Decimal("1e400")),
    *(torch.ones(2), torch.tensor(math.nan), torch.ones(1, device="meta")),
]


@pytest.mark.parametrize("reward", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_a_reward_that_is_not_finite_counts_as_raising(reward: object) -> None:
    collected = run(task=Fake(reward=lambda rollout: reward))
    assert (collected.num_reward_errors, collected.num_rollouts) == (9, 0)
    assert [group.rollouts for group in collected.groups] == [(), (), ()]
    assert "a reward must be one finite number" in collected.reward_errors[0]
    assert f"({type(reward).__name__}); return a float" in collected.reward_errors[0]


NUMBERS = [
    *(1, True, 1.0, Fraction(1), Decimal("1.0")),
    *(np.float32(1), np.float16(1), np.int64(1), np.bool_(True), np.array(1.0), np.ones(1), np.ones((1, 1))),
    *(torch.tensor(1.0), torch.ones(1), torch.tensor(True), torch.tensor(1.0, requires_grad=True)),
]


@pytest.mark.parametrize("reward", NUMBERS, ids=lambda value: type(value).__name__)
def test_any_kind_of_number_is_a_reward(reward: object) -> None:
    collected = run(task=Fake(reward=lambda rollout: reward))
    rewards = [rollout.reward for group in collected.groups for rollout in group.rollouts]
    assert (rewards, {type(value) for value in rewards}) == ([1.0] * 9, {float})


@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_reward_of_none_skips_its_rollout_without_an_error(max_batch: int) -> None:
    collected = run(task=Fake(reward=lambda rollout: None if rollout.sample == 1 else 1.0), max_batch=max_batch)
    assert [[rollout.sample for rollout in group.rollouts] for group in collected.groups] == [[0, 2]] * 3
    assert (collected.num_unscored, collected.num_reward_errors, collected.num_rollouts) == (3, 0, 6)


def test_numbers_returned_with_a_reward_are_kept_by_name_in_order() -> None:
    def reward(rollout: Rollout) -> dict[str, float | None]:
        return {"reward": 1.0, "sample": rollout.sample, "even": None if rollout.sample % 2 else 7}

    for max_batch in (1, 8):
        collected = run(task=Fake(reward=reward), max_batch=max_batch)
        assert collected.numbers == {"sample": [0, 1, 2] * 3, "even": [7, 7] * 3}
        assert collected.num_rollouts == 9
    joined = join(PROMPTS, [collected])
    assert (joined.numbers, joined.num_unscored, joined.error_counts) == (collected.numbers, 0, {})


class Ranking(Fake):
    """Task that rewards a group at once with the rank of each sample's number of tokens."""

    rewards_groups = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[list[int]] = []

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
        self.seen.append([rollout.sample for rollout in rollouts])
        sizes = sorted(rollout.num_tokens for rollout in rollouts)
        return [sizes.index(rollout.num_tokens) for rollout in rollouts]


@pytest.mark.parametrize("max_batch", [1, 2, 16])
def test_a_group_is_rewarded_once_when_its_last_rollout_has_ended_without_the_empty_ones(max_batch: int) -> None:
    task = Ranking()
    # The first sample is the longest and ends last; the second is empty.
    collected = run(lambda request: [6] * [7, 0, 2, 4][request.sample], task, max_batch=max_batch, group_size=4)
    assert task.seen == [[0, 2, 3]] * 3
    assert [group.rewards.tolist() for group in collected.groups] == [[2.0, 0.0, 1.0]] * 3
    assert collected.num_empty == 3


def test_a_group_of_wrong_rewards_is_skipped_whole_and_one_wrong_reward_singly() -> None:
    class Short(Ranking):
        def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
            return [1.0] if prompt.prompt_id == "a" else [1.0, ValueError("no"), None]

    collected = run(task=Short(), group_size=3)
    assert [len(group.rollouts) for group in collected.groups] == [0, 1, 1]
    assert (collected.num_reward_errors, collected.num_unscored) == (5, 2)
    assert "one for each of its 3 rollouts, got 1" in collected.reward_errors[0]


def test_only_the_first_messages_are_kept_whatever_finishes_first() -> None:
    def fail(rollout: Rollout) -> float:
        raise ValueError("x" * 1000)

    for max_batch in (1, 4, 64):
        errors = run(task=Fake(reward=fail), max_batch=max_batch, group_size=4).reward_errors
        assert len(errors) == NUM_MESSAGES == 5
        names = [f"prompt {prompt!r}, sample {sample}: " for prompt in ("a", "b") for sample in range(4)]
        assert [error.startswith(name) for error, name in zip(errors, names, strict=False)] == [True] * 5
        assert all(len(error) == 300 for error in errors)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Install Python's own handler of Ctrl-C, which a test run that was started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("stop", [KeyboardInterrupt, Interrupted])
def test_an_interrupt_passes_and_leaves_the_engine_idle(stop: type[BaseException]) -> None:
    def interrupt(rollout: Rollout) -> float:
        if stop is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise Interrupted(signal.SIGTERM)

    engine = ScriptedEngine(countdown, max_batch=2)
    task = Fake(reward=interrupt)
    with pytest.raises(stop):
        collect(engine, task, PROMPTS, {}, group_size=3, sampling=SAMPLING)
    assert (engine.num_unfinished, engine.step()) == (0, [])
    assert collect(engine, Fake(), PROMPTS, {}, group_size=3, sampling=SAMPLING).num_rollouts == 9


def test_what_cannot_be_collected_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        run(group_size=0)
    with pytest.raises(InputError, match="distinct ids, got 'a' twice"):
        run(prompts=[*PROMPTS, prompt_of(8, prompt_id="a")])
    engine = ScriptedEngine(countdown)
    engine.submit([Request(prompt_id="z", prompt=np.array([1], np.int32), sampling=SAMPLING)])
    with pytest.raises(StateError, match="got one with 1 request;"):
        collect(engine, Fake(), PROMPTS, {}, group_size=1, sampling=SAMPLING)
    assert engine.num_unfinished == 1


def test_a_group_holds_rewarded_rollouts_of_its_prompt() -> None:
    for rollout in (rollout_of([1], prompt_id="a"), rollout_of([1], prompt_id="b", reward=1.0)):
        with pytest.raises(InputError, match="rollouts of its prompt 'a' with rewards"):
            Group(prompt=PROMPTS[0], rollouts=(rollout,))
    assert Group(prompt=PROMPTS[0], rollouts=()).rewards.shape == (0,)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9),
    max_batch=st.integers(1, 5),
    failing=st.sets(st.integers(0, 8)),
)
def test_every_rollout_is_kept_or_counted_once(lengths: list[int], max_batch: int, failing: set[int]) -> None:
    def fail(rollout: Rollout) -> float:
        return math.nan if rollout.sample in failing else 1.0

    collected = run(
        lambda request: [6] * lengths[request.sample],
        Fake(reward=fail),
        max_batch=max_batch,
        group_size=len(lengths),
    )
    empty = {i for i, length in enumerate(lengths) if length == 0}
    wrong = {i for i in failing if i < len(lengths)} - empty
    assert (collected.num_empty, collected.num_reward_errors) == (3 * len(empty), 3 * len(wrong))
    assert collected.num_overlong == 3 * sum(length >= 8 for length in lengths)
    kept = [i for i in range(len(lengths)) if i not in empty | wrong]
    assert [[rollout.sample for rollout in group.rollouts] for group in collected.groups] == [kept] * 3


@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_order_of_starts_changes_no_group(max_batch: int) -> None:
    started: dict[str, list[tuple[str, int]]] = {"by_prompt": [], "by_sample": []}
    results = {}
    for order, starts in started.items():

        def script(request: Request, starts: list[tuple[str, int]] = starts) -> list[int]:
            starts.append((str(request.prompt_id), request.sample))
            return [1 + request.sample, 2]

        engine = ScriptedEngine(script, max_batch=max_batch)
        options = {"group_size": 3, "sampling": Sampling(max_tokens=4), "order": order}
        found = collect(engine, Fake(), PROMPTS[:2], {}, **options)  # type: ignore[arg-type]
        results[order] = [[r.tokens.tolist() for r in group.rollouts] for group in found.groups]
    assert results["by_prompt"] == results["by_sample"] == [[[1, 2], [2, 2], [3, 2]]] * 2
    assert started["by_prompt"] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert started["by_sample"] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt])
def test_an_engine_expects_no_more_requests_while_a_step_is_collected(stop: type[BaseException] | None) -> None:
    engine = ScriptedEngine(countdown, max_batch=2)
    expected: list[bool] = []

    def note(number: int) -> None:
        expected.append(engine.expects_more)
        if stop is not None and number:
            raise stop

    with nullcontext() if stop is None else pytest.raises(stop):
        collect(engine, Fake(), PROMPTS, {}, group_size=2, sampling=SAMPLING, on_progress=note)
    assert expected
    assert not any(expected)
    assert engine.expects_more
