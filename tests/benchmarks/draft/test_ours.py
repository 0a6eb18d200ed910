"""Our drafter's replay: a rollout reads only its sources, and learnt acceptance carries over."""

from functools import partial

from benchmarks.draft.drafters.ours import make_drafter, replay_rows
from benchmarks.draft.histories import plans

from tests.benchmarks.draft.recordings import recording


def test_a_rollout_sees_its_sources_and_nothing_else() -> None:
    # Each task's samples are equal, no token is in both tasks, and none repeats in a rollout.
    tokens = {"a": list(range(20)), "b": list(range(100, 120))}
    found = recording([(task, tokens[task], "0" + "1" * 19) for task in ("a", "a", "b", "b")])
    for history in ("siblings", "none", "wrong_task"):
        plan = plans(found)[history]  # type: ignore[index]
        row = replay_rows(found, plan, partial(make_drafter, "treering", plan), lambda done: None)
        assert (row["precision"] > 0) == (history == "siblings")
        assert (row["bytes_per_token"] > 0) == (history != "none")
