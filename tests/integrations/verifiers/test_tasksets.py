"""Tasksets of verifiers itself in the loop: every call is trained with its ids, and an error stays in its episode."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verifiers.test_verifiers_environment import check_same, collect, rollouts_of
from tests.processes import is_alive, wait_for_the_end_of
from tests.rl.environments.worlds import TURN_END
from treering.errors import ConfigError
from treering.integrations.verifiers.verifiers_environment import VerifiersEnvironment, VerifiersSettings
from treering.rl.collect import Collected
from treering.rl.environments.policy_calls import Session

pytestmark = [pytest.mark.usefixtures("_tasksets"), pytest.mark.timeout(300)]


@contextmanager
def environment_of(python: str, tokenizer: Path, env: str, **fields: Any) -> Iterator[VerifiersEnvironment]:
    renderer = {"name": "default", "tool_parser": "qwen3"}
    own = VerifiersSettings(env=env, tokenizer=str(tokenizer), python=python, renderer=renderer, **fields)
    with closing(VerifiersEnvironment(own)) as environment:
        yield environment


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions of the episodes, with their logs."""
    found = []
    close = Session.close

    def noted(session: Session) -> None:
        found.append(session)
        close(session)

    monkeypatch.setattr(Session, "close", noted)
    return found


def check_exact(found: Collected, sessions: list[Session], num_calls: int) -> None:
    """Check that each trained call is a path of a trained rollout, and each trained token was sampled by a call."""
    rollouts = rollouts_of(found)
    calls = [(session, call) for session in sessions for call in session.calls.values()]
    assert len(calls) == num_calls
    own = [(session, call) for session, call in calls if session.trainable[call.agent]]
    for session, call in own:
        assert any(
            (rollout.prompt_id, rollout.sample) == (session.prompt_id, session.sample)
            and rollout.tokens[: call.path.size].tobytes() == call.path.tobytes()
            for rollout in rollouts
        )
    assert sum(int(rollout.loss_mask.sum()) for rollout in rollouts) == sum(call.rollout.num_tokens for _, call in own)


@pytest.mark.parametrize(("env", "num_turns"), [("tool_taskset", 3), ("turns_taskset", 3)])
def test_every_call_of_a_chat_is_trained_with_the_ids_that_were_sampled(
    python: str, tokenizer: Path, sessions: list[Session], env: str, num_turns: int
) -> None:
    with environment_of(python, tokenizer, env) as environment:
        assert len(environment.tasks) == 3
        found = collect(environment)
        assert not found.error_counts
        check_exact(found, sessions, num_calls=3 * 2 * num_turns)
        assert len({rollout.reward for group in found.groups for rollout in group.rollouts}) > 1
        # Chats end where the tokenizer ends them.
        assert all(
            (call.rollout.tokens[:-1] != TURN_END).all() for session in sessions for call in session.calls.values()
        )
        check_same(rollouts_of(found), rollouts_of(collect(environment)))


def test_each_seat_is_a_group_and_the_judge_is_not_trained(
    python: str, tokenizer: Path, sessions: list[Session]
) -> None:
    with environment_of(python, tokenizer, "seats_taskset", max_tasks=2) as environment:
        found = collect(environment)
    assert not found.error_counts
    check_exact(found, sessions, num_calls=2 * 2 * 3)
    assert len(found.groups) == 4
    assert all(len(group.rollouts) == 2 for group in found.groups)
    assert {call.agent for session in sessions for call in session.calls.values()} == {"first", "second", "judge"}


def test_episodes_with_faults_are_counted_by_cause_and_the_run_goes_on(python: str, tokenizer: Path) -> None:
    with environment_of(python, tokenizer, "faulty_taskset") as environment:
        pid = environment._worker.pid
        found = collect(environment, episode_timeout=20.0)
        assert sum(len(group.rollouts) for group in found.groups) == 2
        causes = sorted(found.error_counts.items())
        assert [count for _, count in causes] == [2, 2, 2, 2]
        assert causes[0][0] == "no end within 20 s (task.episode_timeout)"
        assert "add up to nan" in causes[1][0]
        assert "planted" in causes[2][0]
        assert "planted" in causes[3][0]
        assert any("SystemExit: planted exit" in cause for cause, _ in causes)
        assert environment._worker.pid == pid
        assert is_alive(pid)
    wait_for_the_end_of([pid])


def test_an_episode_that_reaches_the_end_of_its_context_or_goes_beyond_is_kept(
    python: str, tokenizer: Path, sessions: list[Session]
) -> None:
    with environment_of(python, tokenizer, "full_taskset") as environment:
        found = collect(environment)
    assert not found.error_counts
    assert sorted((session.prompt_id, len(session.calls)) for session in sessions) == [
        ("499", 2), ("499", 2), ("500", 1), ("500", 1), ("501", 1), ("501", 1)
    ]  # fmt: skip


def test_what_is_not_there_ends_in_one_line_that_names_no_package_to_fetch(python: str, tokenizer: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"no taskset 'never-heard-of'.*the package that you trust") as error,
        environment_of(python, tokenizer, "never-heard-of"),
    ):
        pass
    assert "\n" not in str(error.value)
    assert "pip install" not in str(error.value)


def test_a_tool_server_that_its_program_would_not_find_is_refused_before_an_agent_waits(
    python: str, tokenizer: Path
) -> None:
    text = r"the tool server in served_taskset runs as its own program.*PYTHONPATH does not reach it"
    with pytest.raises(ConfigError, match=text), environment_of(python, tokenizer, "served_taskset"):
        pass


def test_a_hosted_runtime_without_a_login_is_one_line(python: str, tokenizer: Path) -> None:
    hosted = {"agent": {"runtime": {"type": "prime"}}}
    with environment_of(python, tokenizer, "tool_taskset", max_tasks=1, settings=hosted) as environment:
        found = collect(environment, episode_timeout=60.0)
    assert found.num_reward_errors == 2
    assert all("\n" not in error and "subprocess" in error for error in found.error_counts), found.error_counts
