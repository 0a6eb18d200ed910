"""Episodes of another process in the loop: what is trained, what fails an episode, and what is left behind.

The process is a script that implements the worker's protocol, so these tests do not need verifiers.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import is_alive, wait_for_the_end_of
from tests.rl.environments.worlds import TURN_END, engine_of, model_of, task_of
from treering.engine.protocol import Rollout, Sampling
from treering.errors import ConfigError
from treering.integrations.verifiers import worker_process
from treering.integrations.verifiers.verifiers_environment import VerifiersEnvironment, VerifiersSettings
from treering.rl.collect import Collected
from treering.rl.environments.collect_episodes import collect_episodes

FAKE = [sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py"))]


@contextmanager
def environment_of(mode: str, **settings: Any) -> Iterator[VerifiersEnvironment]:
    own = VerifiersSettings(env="x", tokenizer="none", settings={"mode": mode, **settings})
    with closing(VerifiersEnvironment(own, FAKE)) as environment:
        yield environment


def collect(environment: VerifiersEnvironment, draw: int = 0, **options: Any) -> Collected:
    task = task_of(environment, **{"max_failed": 1.0, **options})
    return collect_episodes(
        engine_of(model_of()),
        task,
        task.prompts,
        {prompt.prompt_id: draw for prompt in task.prompts},
        group_size=2,
        sampling=Sampling(max_tokens=500, stop_tokens=(TURN_END,)),
    )


def rollouts_of(found: Collected, but: str = "") -> list[Rollout]:
    """Return the rollouts that are trained, without those of a task."""
    return [each for group in found.groups for each in group.rollouts if each.prompt_id != but]


def check_same(found: list[Rollout], expected: list[Rollout]) -> None:
    """Check that two runs train on the same data.

    Calls arrive in any order, so batches differ, and sums in float64 differ in their last digits.
    """

    def exact(rollouts: list[Rollout]) -> list[Any]:
        return [(each.key, each.tokens.tolist(), each.loss_mask.tolist(), each.reward) for each in rollouts]

    assert exact(found) == exact(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-12)


def test_a_chat_that_goes_on_is_one_branch_with_both_turns() -> None:
    with environment_of("linear") as environment:
        found = collect(environment)
    assert not found.error_counts
    assert [task.id for task in environment.tasks] == ["a", "b", "c"]
    assert len(found.groups) == 3
    assert found.num_turns == 12
    for group in found.groups:
        assert [rollout.sample for rollout in group.rollouts] == [0, 1]
        for rollout in group.rollouts:
            edges = np.flatnonzero(np.diff(rollout.loss_mask.astype(int)) == 1)
            assert edges.size == 2
            total = int(rollout.tokens.sum())
            assert rollout.reward == total % 5 / 4
    assert found.numbers["num_turns"] == [2.0] * 6


@pytest.mark.parametrize(("mode", "sizes"), [("rerendered", [4] * 3), ("seats", [2] * 6)])
def test_a_chat_rendered_again_is_a_branch_a_turn_and_trained_seats_are_groups(mode: str, sizes: list[int]) -> None:
    with environment_of(mode) as environment:
        found = collect(environment)
    assert not found.error_counts
    assert [len(group.rollouts) for group in found.groups] == sizes


@pytest.mark.parametrize("mode", ["linear", "seats"])
def test_a_run_repeats_whatever_ids_the_traces_have(mode: str) -> None:
    with environment_of(mode) as first, environment_of(mode) as second:
        found = rollouts_of(collect(first))
        check_same(found, rollouts_of(collect(second)))
        other = rollouts_of(collect(second, draw=1))
    assert [each.tokens.tolist() for each in found] != [each.tokens.tolist() for each in other]


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("altered", "1 of 2 sampled messages have no call and 1 of 2 calls have no message"),
        ("lost", "0 of 1 sampled messages have no call and 1 of 2 calls have no message"),
        ("invented", "1 of 3 sampled messages have no call and 0 of 2 calls have no message"),
        ("unrewarded", "agent 'agent' has no reward"),
        ("cold", "an agent asked for temperature = 0.5"),
    ],
)
def test_a_trace_that_differs_from_the_calls_fails_its_episode_by_name(mode: str, text: str) -> None:
    with environment_of(mode) as environment:
        found = collect(environment)
    assert found.num_reward_errors == 6
    assert all(text in error for error in found.error_counts), found.error_counts


def test_attempts_that_were_repeated_or_not_accepted_are_not_trained() -> None:
    with environment_of("abandoned") as environment:
        found = collect(environment)
    assert not found.error_counts
    assert found.num_turns == 18
    assert [len(group.rollouts) for group in found.groups] == [2, 2, 2]
    with environment_of("rejected") as environment:
        found = collect(environment)
    assert not found.error_counts
    assert found.num_turns == 12
    assert all(not group.rollouts for group in found.groups)


def test_what_an_episode_raises_is_counted_and_the_others_are_as_without_it() -> None:
    with environment_of("raises") as environment:
        found = collect(environment)
    assert found.error_counts == {"verifiers: TaskError: planted": 2}
    with environment_of("linear") as environment:
        whole = collect(environment)
    check_same(rollouts_of(found), rollouts_of(whole, but="b"))


def test_an_episode_that_hangs_is_counted_its_process_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_CLEAN_UP_S", 1.0)
    with environment_of("hangs") as environment:
        before = environment._worker.pid
        found = collect(environment, episode_timeout=3.0)
        assert found.error_counts == {"no end within 3 s (task.episode_timeout)": 2}
        wait_for_the_end_of([before])
        again = collect(environment, draw=1, episode_timeout=3.0)
        assert again.num_reward_errors == 2
        assert environment._worker.pid != before


def test_a_process_that_dies_fails_its_episodes_by_name_and_is_started_again() -> None:
    with environment_of("dies") as environment:
        before = environment._worker.pid
        found = collect(environment)
        assert 2 <= found.num_reward_errors <= 6
        assert {error.split(";")[0] for error in found.error_counts} <= {"the process of verifiers ended with status 7"}
        again = collect(environment, draw=1)
        assert again.num_reward_errors >= 2
        assert environment._worker.pid != before


def test_nothing_outlives_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_END_S", 2.0)
    file = tmp_path / "pid"
    with environment_of("leaves", file=str(file)) as environment:
        worker, child = environment._worker.pid, int(file.read_text())
        assert is_alive(worker)
        assert is_alive(child)
    wait_for_the_end_of([worker, child])


def test_refusals_of_the_worker_are_reported_verbatim() -> None:
    with pytest.raises(ConfigError, match=r"task\.env: no taskset 'x'"), environment_of("refuses"):
        pass
    own = VerifiersSettings(env="x", tokenizer="none", python="no/python")
    with pytest.raises(ConfigError, match=r"task\.python is the path of an interpreter, got 'no/python'"):
        VerifiersEnvironment(own)
