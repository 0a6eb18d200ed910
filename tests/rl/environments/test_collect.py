"""What environments sample is trained once, whichever episode ends first and whatever fails."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import treering
from tests.killing import ROOT
from tests.rl.environments.worlds import (
    TURN_END,
    WORLDS,
    Linear,
    Rerendered,
    Resampling,
    SubAgents,
    TwoSeats,
    Watched,
    World,
    collect,
    engine_of,
    model_of,
    task_of,
    user,
)
from treering.engine.protocol import Sampling
from treering.errors import Interrupted, StateError
from treering.rl.collect import Collected, Group
from treering.rl.environments import episodes
from treering.rl.environments.collect_episodes import check_failures, collect_episodes
from treering.rl.environments.environment import EnvTask, Outcome
from treering.rl.environments.episodes import EpisodeLoop
from treering.rl.environments.policy_calls import ContextFullError, Policy
from treering.tree.forest import Forest


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


def forest_of(groups: Iterator[Group] | tuple[Group, ...]) -> Forest:
    return Forest.from_sequences(rollout.tokens for group in groups for rollout in group.rollouts)


def tokens_by_sample(collected: Collected) -> dict[tuple[object, int, int], list[list[int]]]:
    found: dict[tuple[object, int, int], list[list[int]]] = {}
    for number, group in enumerate(collected.groups):
        for rollout in group.rollouts:
            key = (group.prompt.prompt_id, number, rollout.sample)
            found.setdefault(key, []).append(rollout.tokens.tolist())
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_calls_are_paths_and_their_tokens_are_trained_once_as_they_were_sampled(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    collected = collect(engine_of(model), task_of(WORLDS[name]()), num_tasks=2, group_size=4)
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    expected: Counter[tuple[Any, ...]] = Counter()
    for (prompt_id, sample, _, is_trainable), calls in watched.calls.items():
        own = [
            rollout.tokens.tobytes()
            for rollout in rollouts
            if (rollout.prompt_id, rollout.sample) == (prompt_id, sample)
        ]
        for call in calls if is_trainable else ():
            assert any(path.startswith(call.path.tobytes()) for path in own)
            first = call.context.size
            for i, (token, logprob) in enumerate(zip(call.rollout.tokens, call.rollout.policy_logprobs, strict=True)):
                expected[prompt_id, sample, call.path[: first + i].tobytes(), int(token), float(logprob)] += 1
    trained: Counter[tuple[Any, ...]] = Counter()
    for rollout in rollouts:
        for i in np.flatnonzero(rollout.loss_mask):
            before = rollout.tokens[:i].tobytes()
            logprob = float(rollout.policy_logprobs[i])
            trained[rollout.prompt_id, rollout.sample, before, int(rollout.tokens[i]), logprob] += 1
    assert collected.num_reward_errors == 0
    assert trained == expected


@pytest.mark.parametrize("name", WORLDS)
def test_recorded_log_probs_are_those_of_a_forward_pass_over_the_forest(model: PreTrainedModel, name: str) -> None:
    collected = collect(engine_of(model), task_of(WORLDS[name]()), group_size=4)
    forest = forest_of(collected.groups)
    with torch.no_grad():
        logprobs = treering.forward(model, forest).logprobs.numpy()
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    indices, offsets = forest.paths()
    for i, rollout in enumerate(rollouts):
        own = logprobs[indices[offsets[i] : offsets[i + 1]]]
        difference = np.abs(own - rollout.policy_logprobs)[rollout.loss_mask]
        assert difference.max() <= 1e-10


def test_a_chat_goes_on_after_the_very_tokens_that_were_sampled(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes are not valid text, so a chat that is rendered again would have other tokens."""
    watched = Watched(monkeypatch)
    engine = engine_of(model)
    collected = collect(engine, task_of(Linear(), max_turn_tokens=16), num_tasks=4)
    pairs = [pair for calls in watched.calls.values() for pair in pairwise(calls)]
    for before, call in pairs:
        assert call.context[: before.path.size].tolist() == before.path.tolist()
        # The environment ends a turn that was cut off.
        assert (before.path[-1] == TURN_END) != (call.context[before.path.size] == TURN_END)
    assert 0 < sum(before.path[-1] == TURN_END for before, _ in pairs) < len(pairs)
    assert [len(group.rollouts) for group in collected.groups] == [8] * 4


def test_a_turn_computes_only_its_new_tokens(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything before the earlier turn's end is cached."""
    watched = Watched(monkeypatch)
    engine = engine_of(model)
    collect(engine, task_of(Linear()), group_size=1)
    (calls,) = watched.calls.values()
    tails = [calls[0].context.size - 1] + [call.context.size - before.path.size for before, call in pairwise(calls)]
    assert engine.stats.num_prefilled == sum(tails)


def test_two_seats_are_two_groups_and_an_untrained_agent_is_none(model: PreTrainedModel) -> None:
    collected = collect(engine_of(model), task_of(TwoSeats()), num_tasks=2)
    assert [group.prompt.prompt_id for group in collected.groups] == ["t0", "t0", "t1", "t1"]
    first, second = collected.groups[:2]
    assert not np.array_equal(first.rewards, second.rewards)
    assert collected.num_turns == 2 * 8 * 5


def test_sub_agents_sample_the_same_tokens_in_whatever_order_they_run(model: PreTrainedModel) -> None:
    class Reversed(SubAgents):
        order = (20, 10, 0)

    plain, other = (tokens_by_sample(collect(engine_of(model), task_of(world()))) for world in (SubAgents, Reversed))
    assert {key: sorted(paths) for key, paths in plain.items()} == {key: sorted(paths) for key, paths in other.items()}


def test_batches_and_episodes_in_flight_change_no_token(model: PreTrainedModel) -> None:
    def found(max_batch: int, in_flight: int) -> object:
        engine = engine_of(model, max_batch=max_batch)
        return list(tokens_by_sample(collect(engine, task_of(Rerendered(), episodes_in_flight=in_flight))).items())

    assert found(8, 16) == found(2, 3) == found(1, 1)


def test_deterministic_episodes_give_the_same_batches_so_that_a_run_repeats_bitwise(model: PreTrainedModel) -> None:
    found = []
    for _ in range(4):
        engine = engine_of(model, max_batch=3)
        collected = collect(engine, task_of(SubAgents()), num_tasks=2)
        logprobs = [rollout.logprobs.tobytes() for group in collected.groups for rollout in group.rollouts]
        found.append((logprobs, engine.stats))
    assert found[1:] == found[:-1]


class Failing(Linear):
    """Environment in which some samples of a task fail, each in a different way."""

    def __init__(self) -> None:
        self.number: Counter[object] = Counter()
        self.tasks = [EnvTask(id=f"t{i}", data=i) for i in range(2)]

    async def run(self, task: EnvTask, policy: Policy) -> float | Outcome:
        number = policy._session.sample
        if number == 1:
            await policy.chat([user("a")])
            raise ValueError("no number")
        if number == 2:
            sys.exit("bye")
        if number == 3:
            await asyncio.sleep(1000)
        if number == 4:
            await asyncio.gather(policy.chat([user("a")]), self.end())
        if number == 5:
            return float("nan")
        return await super().run(task, policy)

    async def end(self) -> None:
        raise SystemExit(3)


def test_failures_are_counted_by_cause_and_change_no_other_run(model: PreTrainedModel) -> None:
    options = {"max_failed": 1.0, "episode_timeout": 2.0}
    whole = tokens_by_sample(collect(engine_of(model), task_of(Linear()), num_tasks=2))
    engine = engine_of(model)
    collected = collect(engine, task_of(Failing(), **options), num_tasks=2)
    counts = {cause.partition(": ")[2] or cause: count for cause, count in collected.error_counts.items()}
    assert collected.num_reward_errors == 10
    assert sorted(collected.error_counts.values()) == [2, 2, 2, 2, 2]
    text = " | ".join(collected.error_counts)
    for cause in ("ValueError: no number", "SystemExit: bye", "no end within 2 s", "SystemExit: 3", "finite number"):
        assert text.count(cause) == 1, counts
    assert tokens_by_sample(collected) == {key: paths for key, paths in whole.items() if key[2] in (0, 6, 7)}
    # Rows and slots are free again: as many runs as before fit.
    assert engine.num_unfinished == 0
    assert engine.progress() == {}
    assert tokens_by_sample(collect(engine, task_of(Linear()), num_tasks=2)) == whole


class Plain(Linear):
    """Environment whose `run` lacks async."""

    def run(self, task: EnvTask, policy: Policy) -> float:  # type: ignore[override]
        return 1.0


def test_a_run_without_async_is_refused_with_the_fix(model: PreTrainedModel) -> None:
    with pytest.raises(StateError, match="must be a coroutine, got a float; write async def run"):
        collect(engine_of(model), task_of(Plain()), num_tasks=2)


def test_too_many_failures_stop_the_run_with_the_commonest(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    with pytest.raises(StateError, match=r"of 16 episodes; 5 failed, and task\.max_failed allows 25%"):
        collect(engine, task_of(Failing(), max_failed=0.25, episode_timeout=1.0), num_tasks=2)
    assert engine.num_unfinished == 0
    for percent in range(101):
        check_failures({"ValueError: no number": percent}, 100, float(f"{percent}e-2"))


def test_an_episode_that_blocks_the_others_ends_the_run_with_its_location(model: PreTrainedModel) -> None:
    release = threading.Event()

    class Blocking(World):
        async def run(self, task: EnvTask, policy: Policy) -> float:
            release.wait(20)  # blocks here
            return 0.0

    try:
        with pytest.raises(StateError, match=r"blocked it for 0\.3 s at .*test_collect\.py:\d+; await"):
            collect(engine_of(model), task_of(Blocking(), episode_timeout=0.3))
    finally:
        release.set()


def test_an_interrupt_between_episodes_leaves_an_idle_engine(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    def interrupt(num_ended: int) -> None:
        if num_ended:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        collect_episodes(
            engine,
            task_of(Linear()),
            task_of(Linear()).prompts,
            {},
            group_size=4,
            sampling=Sampling(max_tokens=500),
            on_progress=interrupt,
        )
    assert engine.num_unfinished == 0
    assert not any(thread.name.startswith("treering-e") for thread in threading.enumerate())


def test_a_late_call_of_an_ended_episode_is_refused(model: PreTrainedModel) -> None:
    late: list[BaseException] = []

    class Leaving(World):
        async def run(self, task: EnvTask, policy: Policy) -> float:
            async def later() -> None:
                try:
                    await asyncio.sleep(0.05)
                    await policy.chat([user("late")])
                except StateError as error:
                    late.append(error)

            self.task = asyncio.ensure_future(later())
            if policy._session.sample == 1:
                await asyncio.sleep(0.3)
            await policy.chat([user("now")])
            return 0.0

    collected = collect(engine_of(model), task_of(Leaving()), group_size=2)
    assert collected.num_reward_errors == 0
    assert "has ended" in str(late[0])


@pytest.mark.parametrize(
    ("outcome", "rule"),
    [
        (Outcome(reward=1.0, rewards={"critc": 1.0}), "got 'critc'"),
        (Outcome(reward=1.0, turn_rewards={7: 1.0}), "calls of the run, got 7"),
    ],
)
def test_a_reward_for_nobody_fails_its_run(model: PreTrainedModel, outcome: Outcome, rule: str) -> None:
    class Mistaken(World):
        async def run(self, task: EnvTask, policy: Policy) -> Outcome:
            policy.agent("critic")
            await policy.chat([user("hello")])
            return outcome

    collected = collect(engine_of(model), task_of(Mistaken(), max_failed=1.0), group_size=2)
    assert collected.num_reward_errors == 2
    assert rule in next(iter(collected.error_counts))


def test_a_call_has_the_reward_that_its_number_names(model: PreTrainedModel) -> None:
    class Rewarding(World):
        async def run(self, task: EnvTask, policy: Policy) -> Outcome:
            judge = policy.agent("judge", trainable=False)
            first = await policy.chat([user("hello")])
            await judge.chat([user("well?")])
            second = await policy.chat([user("bye")])
            return Outcome(reward=0.0, turn_rewards={first.call: 1.0, second.call: 0.5})

    (group,) = collect(engine_of(model), task_of(Rewarding()), group_size=2).groups
    assert group.runs is not None
    assert group.runs.turn_rewards == ((1.0, 0.5), (1.0, 0.5))


def test_a_full_context_is_an_error_that_the_episode_may_catch(model: PreTrainedModel) -> None:
    class Endless(World):
        async def run(self, task: EnvTask, policy: Policy) -> float:
            messages = [user("go on")]
            try:
                while True:
                    messages += [(await policy.chat(messages)).message, user("more")]
            except ContextFullError:
                return 0.5

    collected = collect(engine_of(model), task_of(Endless()), group_size=2)
    assert [rollout.reward for group in collected.groups for rollout in group.rollouts] == [0.5, 0.5]
    assert all(rollout.num_tokens <= 500 for group in collected.groups for rollout in group.rollouts)


def test_a_context_that_is_sampled_again_gets_other_answers_and_a_run_repeats_them(model: PreTrainedModel) -> None:
    runs = [tokens_by_sample(collect(engine_of(model), task_of(Resampling()), group_size=2)) for _ in range(2)]
    assert runs[0] == runs[1]
    for paths in runs[0].values():
        assert len({tuple(path) for path in paths}) > 1
    first, second = list(runs[0].values())
    assert first != second


HANGING = """
import asyncio, threading
from treering.rl.environments import episodes
from tests.rl.environments.worlds import Linear, collect, engine_of, model_of, task_of

class Hanging(Linear):
    async def run(self, task, policy):
        if policy._session.sample == 1:
            await asyncio.to_thread(threading.Event().wait)
        return await super().run(task, policy)

episodes.CLEAN_UP_S = 0.5
found = collect(engine_of(model_of()), task_of(Hanging(), episode_timeout=1.0), group_size=2)
print(f"{found.num_reward_errors} of 2: {next(iter(found.error_counts))}")
"""


def test_a_tool_that_hangs_in_a_thread_leaves_its_episode_out_and_lets_the_program_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HANGING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ended.stdout == (
        "1 of 2: no end within 1 s (task.episode_timeout), and its clean-up did not end within 0.5 s\n"
    ), ended.stderr
    assert ended.returncode == 0


def test_an_engines_error_ends_the_step(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    def broken() -> list[Any]:
        raise StateError("logits hold NaN")

    engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(StateError, match="logits hold NaN"):
        collect(engine, task_of(Linear(), max_failed=0.0))


def test_waiting_episodes_hold_no_row(model: PreTrainedModel) -> None:
    """One row serves all episodes, although those that asked already wait for the last one."""
    started = asyncio.Event()

    class Meeting(World):
        def __init__(self) -> None:
            self.num_there = 0

        async def run(self, task: EnvTask, policy: Policy) -> float:
            first = await policy.chat([user("hello")])
            self.num_there += 1
            if self.num_there == 8:
                started.set()
            await started.wait()
            return self.reward([first.text, (await policy.chat([user("bye")])).text])

    collected = collect(engine_of(model, max_batch=1), task_of(Meeting()))
    assert collected.num_rollouts == 8


class Sandboxed(World):
    """Environment with different clean-ups for cancelled episodes, whose sandbox takes a second to close."""

    kinds = ("finally", "context", "nested", "gathered", "thread", "awaited thread", "blocking", "generator")

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []

    async def run(self, task: EnvTask, policy: Policy) -> float:
        kind = self.kinds[policy._session.sample]
        self.opened.append(kind)
        await getattr(self, kind.replace(" ", "_").replace("finally", "plain"))(kind)
        return 0.0

    @asynccontextmanager
    async def sandbox(self, kind: str) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(1.0)
            self.closed.append(kind)

    def close_in_thread(self, kind: str) -> None:
        time.sleep(1.0)
        self.closed.append(kind)

    async def plain(self, kind: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            # Steps of a clean-up are separate tasks, which the end of the run must not cancel.
            await asyncio.wait_for(asyncio.shield(asyncio.sleep(1.0)), 5.0)
            self.closed.append(kind)

    async def context(self, kind: str) -> None:
        async with self.sandbox(kind):
            await asyncio.sleep(1000)

    async def nested(self, kind: str) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.context(kind))

    async def gathered(self, kind: str) -> None:
        left = asyncio.ensure_future(self.context(kind))
        await asyncio.gather(asyncio.sleep(1000), asyncio.shield(left))

    async def thread(self, kind: str) -> None:
        await asyncio.to_thread(self.close_in_thread, kind)

    async def awaited_thread(self, kind: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.to_thread(self.close_in_thread, kind)

    async def blocking(self, kind: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            self.close_in_thread(kind)

    async def generator(self, kind: str) -> None:
        async def lines() -> AsyncIterator[int]:
            async with self.sandbox(kind):
                yield 0
                await asyncio.sleep(1000)

        async for _ in lines():
            await asyncio.sleep(1000)


def test_an_episode_that_times_out_cleans_up_whatever_form_its_clean_up_has(model: PreTrainedModel) -> None:
    world = Sandboxed()
    collected = collect(engine_of(model), task_of(world, max_failed=1.0, episode_timeout=0.5))
    assert sorted(world.closed) == sorted(world.opened) == sorted(world.kinds)
    assert collected.error_counts == {"no end within 0.5 s (task.episode_timeout)": 8}


@pytest.mark.parametrize("episode_timeout", [100.0, 0.5])
def test_an_interrupted_step_lets_its_episodes_clean_up(model: PreTrainedModel, episode_timeout: float) -> None:
    """Also an episode in the middle of its clean-up, which a second cancellation would end."""
    world, until_s = Sandboxed(), time.monotonic() + 1.0

    def interrupt(_: int) -> None:
        if time.monotonic() > until_s and len(world.opened) == len(world.kinds):
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        collect_episodes(
            engine_of(model),
            task_of(world, max_failed=1.0, episode_timeout=episode_timeout),
            task_of(world).prompts[:1],
            {},
            group_size=8,
            sampling=Sampling(max_tokens=500),
            on_progress=interrupt,
        )
    assert sorted(world.closed) == sorted(world.opened) == sorted(world.kinds)


def test_episodes_that_do_not_end_are_left_after_a_time_and_counted(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "CLEAN_UP_S", 0.5)
    release = threading.Event()

    class Stubborn(World):
        async def run(self, task: EnvTask, policy: Policy) -> float:
            while policy._session.sample == 0:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
            if policy._session.sample == 1:
                await asyncio.to_thread(release.wait)
            await policy.chat([user("hello")])
            return 0.0

    with pytest.warns(UserWarning, match=r"^2 cancelled episodes.* did not end within 0\.5 s and were abandoned"):
        collected = collect(engine_of(model), task_of(Stubborn(), max_failed=1.0, episode_timeout=0.5), group_size=3)
    release.set()
    limit = "no end within 0.5 s (task.episode_timeout), and its clean-up did not end within 0.5 s"
    assert collected.error_counts == {limit: 2}
    assert collected.num_rollouts == 1


def test_a_generator_that_nobody_holds_any_more_is_closed_and_not_cancelled() -> None:
    closed = []

    async def lines() -> AsyncIterator[int]:
        try:
            yield 0
        finally:
            await asyncio.sleep(0.5)
            closed.append("closed")

    async def leave() -> None:
        async for _ in lines():
            break

    with EpisodeLoop() as loop:
        loop.start(leave()).result()
    assert closed == ["closed"]
