"""The ablation: which variants are replayed, that drafts are equal, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.draft import ablation as draft_ablation
from benchmarks.draft.ablation import main, measure, read

from tests.benchmarks.draft.drafting import write
from treering.data import Trajectory, write_trajectories
from treering.errors import InputError

WITHOUT_REWARD = ("treering_frequency", "treering_recency", "treering")
ALL = ("treering_frequency", "treering_reward", "treering_recency", "treering")

Key = tuple[str, str, str]


def rows_of(report: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    found = {(row["drafter"], row["shape"], row["drafts"]): row for row in report["rows"]}
    assert len(found) == len(report["rows"])
    return found


def measured(file: Path) -> dict[str, Any]:
    return measure(read([file], None, None, 0))


def test_every_policy_and_shape_drafts_no_more_than_the_tree_by_frequency_does(tmp_path: Path) -> None:
    report = measured(write(tmp_path, rewards=True))
    rows = rows_of(report)
    variants = [(name, shape) for name in ALL for shape in ("tree", "chain")]
    assert list(rows) == [(*variant, drafts) for variant in variants for drafts in ("shipped", "equal")]
    assert report["notes"] == []
    reference = rows["treering_frequency", "tree", "shipped"]
    # Its own drafts are equal as they are.
    equal = rows["treering_frequency", "tree", "equal"]
    assert equal == reference | {"drafts": "equal", "ratio_to_frequency": 1.0}
    for (_, shape, drafts), row in rows.items():
        assert (row["recording"], row["history"], row["shape"]) == ("rollouts", "siblings", shape)
        # A step accepts what it drafted right and emits one more, but at a run's end.
        expected = 1 + row["precision"] * row["drafted_per_step"]
        assert expected - row["tokens_per_step"] / 36 <= row["tokens_per_step"] <= expected + 1e-9
        assert ("ratio_to_frequency" in row) == (drafts == "equal")
        if drafts == "equal":
            assert row["drafted_per_step"] <= reference["drafted_per_step"]
            assert row["ratio_to_frequency"] == row["tokens_per_step"] / reference["tokens_per_step"]
    assert any(row["drafted_per_step"] > reference["drafted_per_step"] for row in rows.values())


def test_a_chain_is_no_tree_and_one_policy_not_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    make = draft_ablation.make_drafter

    def watched(name: str, *given: Any, **settings: Any) -> Any:
        made.append((name, settings["shape"]))
        return make(name, *given, **settings)

    monkeypatch.setattr(draft_ablation, "make_drafter", watched)
    rows = rows_of(measured(write(tmp_path, rewards=True)))
    assert list(dict.fromkeys(made)) == [(name, shape) for name in ALL for shape in ("tree", "chain")]
    assert (
        rows["treering", "tree", "shipped"]["drafted_per_step"]
        > rows["treering", "chain", "shipped"]["drafted_per_step"]
    )


def test_history_is_that_of_the_epoch_before_where_there_is_one(tmp_path: Path) -> None:
    report = measured(write(tmp_path, epochs=2))
    assert {row["history"] for row in report["rows"]} == {"earlier"}


def test_history_has_three_epochs_where_there_are_as_many_and_recency_tells_them_apart(tmp_path: Path) -> None:
    (case,) = read([write(tmp_path, epochs=4)], None, None, 0)
    assert {*case.plan.versions[-1].tolist()} == {0, 1, 2}
    rows = rows_of(measure([case]))
    assert {row["history"] for row in rows.values()} == {"earlier"}
    newest, all_alike = (rows[name, "tree", "shipped"] for name in ("treering_recency", "treering_frequency"))
    assert newest["tokens_per_step"] != all_alike["tokens_per_step"]


@pytest.mark.parametrize("rewards", [(None, None, None, None), (0.5, None, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0)])
def test_rewards_count_only_where_they_are_known_and_tell_rollouts_of_a_task_apart(
    tmp_path: Path, rewards: tuple[float | None, ...]
) -> None:
    file = tmp_path / "some.jsonl"

    def put(values: tuple[float | None, ...]) -> None:
        tokens = np.arange(12, dtype=np.int32)
        tasks = ("a", "a", "b", "b")
        given = [Trajectory(task_id=task, tokens=tokens, reward=own) for task, own in zip(tasks, values, strict=True)]
        write_trajectories(file, given)

    put(rewards)
    report = measured(file)
    assert [row["drafter"] for row in report["rows"][::4]] == list(WITHOUT_REWARD)
    assert report["notes"] == [
        "some: rewards are unknown or equal within every task, so treering_reward is left out",
    ]
    put((1.0, 1.0, 0.0, 1.0))
    assert [row["drafter"] for row in measured(file)["rows"][::4]] == list(ALL)


def test_what_cannot_draft_as_little_has_one_row_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_ablation, "at_most", lambda *_: None)
    report = measured(write(tmp_path))
    assert {row["drafts"] for row in report["rows"]} == {"shipped"}
    assert report["notes"][1:] == [
        f"rollouts: {name} {shape} drafts more than the tree of treering_frequency, whatever its min_acceptance"
        for name in WITHOUT_REWARD
        for shape in ("tree", "chain")
    ]


def test_the_command_shows_a_line_a_variant_and_writes_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files.append(str(write(tmp_path / name)))
    with pytest.raises(
        SystemExit, match=r"draft_ablation: .*no two alike, got rollouts, rollouts for 2 files.*--names"
    ):
        main(files)
    main([*files, "--names", "first,second", "--limit-tokens", "100", "--out", str(tmp_path / "rows.json")])
    report = json.loads((tmp_path / "rows.json").read_text())
    assert set(report) == {"machine", "versions", "limit_tokens", "rows", "notes"}
    assert list(dict.fromkeys(row["recording"] for row in report["rows"])) == ["first", "second"]
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    policies = ("frequency", "recency", "calibrated")
    assert [line[:2] for line in lines if "tree" in line] == [[name, "tree"] for name in policies] * 2
    assert ["first,", "history:", "siblings"] in lines
    row = report["rows"][0]
    rates = [f"{row['tokens_per_step']:.2f}", f"{row['drafted_per_step']:.2f}"]
    assert ["frequency", "tree", *rates, *rates, "1.000"] in lines
    assert "first: rewards are unknown" in printed.err


def test_progress_goes_from_recording_to_recording(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    file = write(tmp_path)
    measure(read([file, file], "a,b", None, 0), lambda words, done: told.append((words, done)))
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    for name, low, high in (("a", 0.0, 0.5), ("b", 0.5, 1.0)):
        own = [done for words, done in told if words.startswith(f"{name}: ")]
        assert low <= min(own) < max(own) <= high
    assert told[0][0] == "a: treering_frequency tree"


def test_bad_input_is_refused_before_anything_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_ablation, "replay_rows", lambda *_: pytest.fail("replayed"))
    file, single = write(tmp_path), tmp_path / "single.jsonl"
    write_trajectories(single, [Trajectory(task_id="a", tokens=np.array([1, 2], np.int32))])
    for files, names, limit, words in (
        ([file, single], None, 0, "single: an ablation needs history, and no task has a second rollout"),
        ([file], "a,b", 0, "a name each, no two alike, got a, b for 1 files"),
        ([file, file], "a,a", 0, "no two alike, got a, a for 2 files"),
        ([file], None, -1, "--limit-tokens must be at least 0, got -1"),
        ([tmp_path / "absent.jsonl"], None, 0, "absent"),
    ):
        with pytest.raises(InputError, match=words):
            read(files, names, None, limit)
    with pytest.raises(SystemExit, match="--out needs an existing folder"):
        main([str(file), "--out", str(tmp_path / "absent" / "rows.json")])
