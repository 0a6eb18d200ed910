"""The whole of `python -m benchmarks draft` on small files: which rows there are, and what is refused."""

import json
from pathlib import Path

import pytest
from benchmarks.draft import bench as draft
from benchmarks.draft.drafters import arctic

from tests.benchmarks.draft.drafting import NUM_SAMPLES, RATES, rival, rows_of, write
from treering.data import AgentSpec, generate_trajectories, write_trajectories

HISTORY_DRAFTERS = ["naive", "paper_frequency", "released", "treering", "treering_chain"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arctic, "is_installed", lambda: False)


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
    assert report["environment"]["num_sampled_tokens"] == 2 * NUM_SAMPLES * 36
    assert report["notes"] == [arctic.HINT]
    assert told == sorted(told)
    assert told[-1] == 1.0
    json.dumps(report, allow_nan=False)


def test_epochs_give_earlier_rollouts_and_rewards_the_papers_priority(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path, epochs=4, rewards=True), drafters=["naive", "paper"])
    assert {("naive", "earlier"), ("naive", "recent"), ("paper", "earlier")} <= set(rows_of(report))
    assert report["environment"]["num_generations"] == 4


def test_beside_arctic_ours_drafts_no_more_than_its_best_row_and_is_shown_as_shipped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(monkeypatch, [(1.5, 9.0), (2.0, 3.0)])
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering"])
    rows = rows_of(report)
    for history in ("siblings", "wrong_task"):
        assert rows["treering", history]["drafted_per_step"] <= 3.0
        assert rows["treering", history]["ratio_to_best_arctic"] == rows["treering", history]["tokens_per_step"] / 2.0
    alone = rows_of(draft.measure(file=write(tmp_path), drafters=["treering"]))
    shipped, own = rows["treering_shipped", "siblings"], alone["treering", "siblings"]
    assert {key: shipped[key] for key in ("tokens_per_step", "drafted_per_step", "precision")} == {
        key: own[key] for key in ("tokens_per_step", "drafted_per_step", "precision")
    }


def test_estimates_have_a_table_for_each_history_that_is_the_shipped_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(monkeypatch, [(1.5, 1.0)])
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering", "treering_chain", "naive"])
    rows = rows_of(report)
    assert list(report["reliability"]) == ["none", "siblings", "wrong_task"]
    for history, bins in report["reliability"].items():
        tried = sum(one["num_drafted"] for one in bins)
        distances = [one["num_drafted"] * abs(one["estimate"] - one["accepted"]) for one in bins]
        expected = sum(distances) / max(tried, 1)
        assert rows["treering_shipped", history]["calibration_error"] == pytest.approx(expected)
    assert all("reliability" not in row for row in report["drafters"])


def test_turns_of_an_agent_are_replayed_as_runs(tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    given = list(generate_trajectories(AgentSpec(num_tasks=2, num_trials=3, vocab_size=500, seed=0)))
    write_trajectories(file, given)
    report = draft.measure(file=file, drafters=["none", "naive", "treering"])
    sampled = sum(int(one.loss_mask.sum()) for one in given if one.loss_mask is not None)
    assert report["environment"]["num_sampled_tokens"] == sampled
    assert rows_of(report)["treering", "siblings"]["tokens_per_step"] > 1.0
