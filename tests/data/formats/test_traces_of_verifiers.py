"""Traces checked against verifiers: its own views of what it wrote, and that it reads what we write."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.data.traces import Record, answer, linked, message, run
from treering.data import AgentTrace, read_traces, write_traces

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: pip install 'verifiers>=0.4'")

NODES = [
    message(None, [1]),
    answer(0, [2], [3, 33], advantages=[0.123456, -1.0]),
    linked(answer(1, [4], [5]), (1, "compaction_attempt")),
    linked(answer(1, [4], [6]), (1, "compaction_attempt")),
    message(None, [7]),
    linked(answer(4, [2], [8]), (3, "compaction")),
    answer(0, [2], [9]),
]
REWARDS = {"exact": {"score": 1.0, "weight": 0.5}, "style": {"score": -2.0, "weight": 0.25}, "skipped": None}


def their_traces(folder: Path) -> list[Any]:
    from verifiers.v1.trace import WireTrace
    from verifiers.v1.utils.trace_store import read_episodes

    return [trace for episode in read_episodes(folder, WireTrace) for trace in episode.traces]


def their_file(folder: Path, *, key: str | None) -> list[Any]:
    """Have verifiers write an episode of a solver and a judge, and read it again."""
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.utils.trace_store import write_episode

    task: Record = {"type": "Task", "data": {"idx": 0, "prompt": "text"}, "key": key}
    judge = {"name": "judge", "trainable": False, "config": {}}
    runs = [run(*NODES, task=task, rewards=REWARDS, agent={"name": "agent", "config": {}})]
    runs.append(run(*NODES, task=task, agent=judge))
    folder.mkdir(exist_ok=True)
    write_episode(folder, WireEpisode.model_validate({"task": task, "ok": True, "traces": runs}))
    return their_traces(folder)


def our_traces(folder: Path) -> list[AgentTrace]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_traces(folder / "traces.jsonl")


def test_trajectories_are_the_branches_that_verifiers_trains(tmp_path: Path) -> None:
    for theirs, ours in zip(their_file(tmp_path, key="k"), our_traces(tmp_path), strict=True):
        branches = [branch for branch in theirs.branches if branch.trainable and theirs.agent.trainable]
        trajectories = ours.trajectories()
        assert len(trajectories) == len(branches) == (3 if theirs.agent.trainable else 0)
        for branch, found in zip(branches, trajectories, strict=True):
            assert found.tokens.tolist() == branch.token_ids
            assert found.loss_mask.tolist() == branch.sampled_mask
            assert found.logprobs.tolist() == branch.logprobs
            assert (None if found.advantages is None else found.advantages.tolist()) == branch.advantages
            assert found.reward == theirs.reward


def test_log_probs_that_verifiers_writes_are_rounded_to_four_decimals(tmp_path: Path) -> None:
    their_file(tmp_path, key="k")
    assert our_traces(tmp_path)[0].nodes[1].logprobs.tolist() == [round(-3 / 7, 4), round(-33 / 7, 4)]


@pytest.mark.parametrize("key", ["k", None])
def test_the_task_is_the_one_that_verifiers_names(tmp_path: Path, key: str | None) -> None:
    from verifiers.v1.task import task_key

    theirs = their_file(tmp_path, key=key)[0]
    hashed = task_key(theirs.task.data.model_dump(mode="json", exclude_none=True))
    assert our_traces(tmp_path)[0].task_id == (key or hashed)


def test_verifiers_reads_what_we_write_with_all_digits_of_the_advantages(tmp_path: Path) -> None:
    before = their_file(tmp_path / "theirs", key="k")
    scored = [trace.with_advantages([1 / 3] * trace.num_trajectories) for trace in our_traces(tmp_path / "theirs")]
    (tmp_path / "ours").mkdir()
    write_traces(tmp_path / "ours" / "traces.jsonl", scored)
    after = their_traces(tmp_path / "ours")
    assert [trace.id for trace in after] == [trace.id for trace in before]
    for theirs, ours in zip(after, scored, strict=True):
        branches = [branch for branch in theirs.branches if branch.trainable and theirs.agent.trainable]
        expected = [trajectory.advantages.tolist() for trajectory in ours.trajectories()]
        assert [branch.advantages for branch in branches] == expected
    assert after[0].branches[-1].advantages == [0, 0, 1 / 3]
    assert _without_advantages(tmp_path / "ours") == _without_advantages(tmp_path / "theirs")


def _without_advantages(folder: Path) -> list[Any]:
    records = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    for episode in records:
        for trace in episode["traces"]:
            for node in trace["nodes"]:
                node.pop("advantages", None)
    return records
