"""The whole of `python -m benchmarks draft` on small files: which rows there are, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.draft import bench as draft
from benchmarks.draft.drafters import arctic as draft_arctic

from tests.benchmarks.draft.drafting import NUM_SAMPLES, RATES, costs_file, rival, rows_of, write
from treering import Drafter
from treering.data import AgentSpec, Trajectory, generate_trajectories, write_trajectories
from treering.errors import InputError

HISTORY_DRAFTERS = ["naive", "paper", "released", "treering", "treering_chain"]
ABLATION = ["treering_frequency", "treering_reward", "treering_recency"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: False)


def test_every_drafter_is_replayed_on_every_history_that_the_file_gives(tmp_path: Path) -> None:
    told: list[float] = []
    report = draft.measure(file=write(tmp_path), on_progress=lambda words, done: told.append(done or 0.0))
    rows = rows_of(report)
    own = [(name, "none") for name in ("none", "ngram", "naive", "treering", "treering_chain")]
    assert list(rows) == own + [(name, history) for history in ("siblings", "wrong_task") for name in HISTORY_DRAFTERS]
    assert all(set(row) >= {"drafter", "history"} | RATES for row in report["drafters"])
    assert rows["none", "none"]["tokens_per_step"] == 1.0
    for name in HISTORY_DRAFTERS:
        assert rows[name, "siblings"]["tokens_per_step"] > 1.5 > rows[name, "wrong_task"]["tokens_per_step"] >= 1
    for row in report["drafters"]:
        # A step accepts what it drafted right and emits one more, but at a run's end.
        expected = 1 + row["precision"] * row["drafted_per_step"]
        assert expected - row["tokens_per_step"] / 36 <= row["tokens_per_step"] <= expected + 1e-9
    assert report["file"] == "rollouts.jsonl.gz"
    assert report["environment"]["num_sampled_tokens"] == 2 * NUM_SAMPLES * 36
    assert report["environment"]["siblings"] == "before"
    assert report["notes"] == [draft.HINT]
    assert told == sorted(told)
    assert told[-1] == 1.0
    json.dumps(report, allow_nan=False)


def test_the_ablation_is_replayed_when_it_is_asked_for(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path, rewards=True), drafters=ABLATION)
    assert list(rows_of(report)) == [
        (name, history) for history in ("none", "siblings", "wrong_task") for name in ABLATION
    ]
    for name in ABLATION:
        assert rows_of(report)[name, "siblings"]["tokens_per_step"] > 1.5


def test_epochs_give_earlier_rollouts_and_the_control_of_ages(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path, epochs=4), drafters=["naive", "treering"])
    controls = [(row["drafter"], row["history"], row["control"]) for row in report["drafters"] if "control" in row]
    assert controls == [(f"treering_{name}", "earlier", name) for name in ("true_age", "shuffled_age")]
    assert ("naive", "earlier") in rows_of(report)
    assert report["environment"]["num_generations"] == 4


def test_rewards_are_the_papers_priority_where_all_are_known_and_frequency_stands_beside(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path, rewards=True), drafters=["paper"])
    rows = [(row["drafter"], row.get("config")) for row in report["drafters"]]
    assert rows == [("paper", {"priority": "reward"}), ("paper_frequency", None)] * 2
    report = draft.measure(file=write(tmp_path), drafters=["paper"])
    rows = [(row["drafter"], row.get("config")) for row in report["drafters"]]
    assert rows == [("paper", {"priority": "frequency"})] * 2


def test_drafter_and_history_name_one_row_of_all_but_arctics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rival(monkeypatch, [(1.5, 9.0), (2.0, 3.0)])
    told: list[float] = []
    file, cost = write(tmp_path, epochs=4, rewards=True), costs_file(tmp_path, [1.0, 2.0])
    report = draft.measure(file=file, cost=cost, on_progress=lambda words, done: told.append(done or 0.0))
    found = [(row["drafter"], row["history"]) for row in report["drafters"] if row["drafter"] != "arctic"]
    assert len(found) == len(set(found))
    names = ["naive", "paper", "paper_frequency", "released", "treering", "treering_shipped", "treering_known_costs"]
    names += ["treering_chain", "treering_chain_known_costs"]
    earlier = [name for name, history in found if history == "earlier"]
    assert earlier == [*names, "treering_true_age", "treering_shuffled_age"]
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert all(("learnt_bytes" in row) == row["drafter"].startswith("treering") for row in report["drafters"])


def test_estimates_have_a_table_for_each_history_that_is_the_shipped_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(monkeypatch, [(1.5, 1.0)])
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering", "treering_chain", "naive"])
    rows = rows_of(report)
    assert list(report["reliability"]) == ["none", "siblings", "wrong_task"]
    errors = {}
    for history, bins in report["reliability"].items():
        tried = sum(one["num_drafted"] for one in bins)
        distances = [one["num_drafted"] * abs(one["estimate"] - one["accepted"]) for one in bins]
        errors[history] = sum(distances) / max(tried, 1)
        assert rows["treering_shipped", history]["calibration_error"] == pytest.approx(errors[history])
    assert errors["siblings"] > 0
    # Another number of drafts has other estimates, so this was not the other row's table.
    assert rows["treering", "siblings"]["calibration_error"] != pytest.approx(errors["siblings"])
    assert all("reliability" not in row for row in report["drafters"])
    alone = draft.measure(file=write(tmp_path), drafters=["treering", "naive"])
    assert alone["reliability"] == report["reliability"]
    assert draft.measure(file=write(tmp_path), drafters=["naive"])["reliability"] == {}


def test_rows_have_a_predicted_speedup_where_costs_are_given(tmp_path: Path) -> None:
    costs = costs_file(tmp_path, [1000.0, 1000.0])
    report = draft.measure(file=write(tmp_path), drafters=["none", "naive"], cost=costs, batch=2)
    for row in report["drafters"]:
        # A pass costs the same whatever is in it, and so much that drafting is nothing.
        assert row["predicted_speedup"] == pytest.approx(row["tokens_per_step"], rel=1e-3)
    assert report["environment"]["batch"] == 2


def test_with_costs_ours_is_replayed_once_more_knowing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[list[float]] = []
    sizes: list[int] = []
    use_costs, propose = Drafter.use_costs, Drafter.propose
    monkeypatch.setattr(
        Drafter, "use_costs", lambda drafter, given: known.append(given.seconds.tolist()) or use_costs(drafter, given)
    )
    monkeypatch.setattr(
        Drafter, "propose", lambda drafter, rows: sizes.append(len(rows.prompt_ids)) or propose(drafter, rows)
    )
    costs = costs_file(tmp_path, [1.0, 2.0])
    report = draft.measure(file=write(tmp_path), drafters=["treering"], cost=costs, batch=1)
    for history in ("none", "siblings", "wrong_task"):
        rows = [row for row in report["drafters"] if row["history"] == history]
        assert [row["drafter"] for row in rows] == ["treering", "treering_known_costs"]
    assert known == [[1.0, 2.0]] * 3
    assert sizes[0] == 2  # one sample of each task side by side
    assert sizes[-1] == 1
    assert {1, 2} == set(sizes)


def test_the_longest_draft_holds_for_all(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path), max_draft=2)
    assert 1 < max(row["drafted_per_step"] for row in report["drafters"]) <= 2


def test_siblings_before_are_fewer(tmp_path: Path) -> None:
    rates = [
        rows_of(draft.measure(file=write(tmp_path), drafters=["naive"], siblings=siblings))["naive", "siblings"]
        for siblings in ("before", "others")
    ]
    assert rates[0]["tokens_per_step"] < rates[1]["tokens_per_step"]


def test_what_a_limit_leaves_out_is_said(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path), drafters=["none"], limit_tokens=10)
    assert report["environment"]["num_tasks"] == 1
    assert report["notes"] == [
        "1 tasks were left out, 216 sampled tokens stayed; --limit-tokens N takes more, and 0 all"
    ]
    assert not draft.measure(file=write(tmp_path), drafters=["none"], limit_tokens=None)["notes"]


def test_arctics_rows_have_their_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: True)

    def replay(*given: Any) -> list[dict[str, Any]]:
        return [dict.fromkeys(RATES, 1.0) | {"config": {"depth": config.depth}} for config in given[2][:2]]

    monkeypatch.setattr(draft_arctic, "replay_arctic", replay)
    report = draft.measure(file=write(tmp_path), drafters=["arctic"])
    assert [(row["drafter"], row["history"]) for row in report["drafters"]] == [
        ("arctic", history) for history in ("none", "siblings", "wrong_task") for _ in range(2)
    ]
    assert {row["config"]["depth"] for row in report["drafters"]} == {24, 64}
    assert report["notes"] == []


def test_lines_without_an_epoch_among_others_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    given = [Trajectory(task_id="a", tokens=np.array([1, 2], np.int32), epoch=epoch) for epoch in (0, 0, None, 1)]
    write_trajectories(file, given)
    report = draft.measure(file=file, drafters=["naive"])
    assert {row["history"] for row in report["drafters"]} == {"none", "siblings"}
    assert [note.split(", so")[0] for note in report["notes"]] == ["1 of 4 rollouts have no epoch"]


def test_turns_of_an_agent_are_replayed_as_runs(tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    given = list(generate_trajectories(AgentSpec(num_tasks=2, num_trials=3, vocab_size=500, seed=0)))
    write_trajectories(file, given)
    report = draft.measure(file=file, drafters=["none", "naive", "treering"])
    sampled = sum(int(one.loss_mask.sum()) for one in given if one.loss_mask is not None)
    assert report["environment"]["num_sampled_tokens"] == sampled
    assert rows_of(report)["treering", "siblings"]["tokens_per_step"] > 1.0


def test_bad_input_is_refused_in_words_before_anything_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "jobs", lambda *_: pytest.fail("replayed"))
    file, bad = write(tmp_path), tmp_path / "costs.json"
    bad.write_text('{"num_tokens": [1], "seconds": [Infinity]}')
    for options, words in (
        ({"drafters": ["naive", "best"]}, "--drafters are some of none, ngram.*got best"),
        ({"drafters": []}, "--drafters are some of"),
        ({"drafters": ["arctic"]}, "got arctic alone.*`make peers` installs it"),
        ({"max_draft": 0}, "--max-draft must be at least 1, got 0"),
        ({"max_draft": 65}, "--max-draft is at most 64 for treering, treering_chain, got 65"),
        ({"max_draft": 100, "drafters": ["naive", "treering_recency"]}, "at most 64 for treering_recency, got 100"),
        ({"limit_tokens": -1}, "--limit-tokens must be at least 1, got -1"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"match_drafts": 0.0}, "--match-drafts is a finite number of drafted tokens above 0, got 0.0"),
        ({"match_drafts": -1.0}, "above 0, got -1.0"),
        ({"match_drafts": math.nan}, "above 0, got nan: give a rival's drafted_per_step"),
        ({"match_drafts": math.inf}, "above 0, got inf"),
        ({"match_drafts": 3.0, "drafters": ["naive"]}, "--match-drafts is for treering, got --drafters naive"),
        ({"cost": tmp_path / "absent.json"}, "absent.json"),
        ({"cost": bad}, "costs.json: seconds of a pass are finite"),
        ({"file": tmp_path / "absent.jsonl"}, "absent.jsonl"),
    ):
        with pytest.raises(InputError, match=words):
            draft.measure(**{"file": file} | options)


def test_a_draft_may_be_as_long_as_ours_can_and_longer_where_ours_is_not_replayed(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert draft.measure(file=file, max_draft=64, drafters=["treering"])["environment"]["max_draft"] == 64
    assert draft.measure(file=file, max_draft=100, drafters=["naive"])["environment"]["max_draft"] == 100
