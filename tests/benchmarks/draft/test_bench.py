"""`python -m benchmarks draft` on small files: which rows the report has, and what is refused."""

import json
from pathlib import Path

import pytest
from benchmarks.draft import bench as draft
from benchmarks.draft.drafters import arctic

from tests.benchmarks.draft.drafting import NUM_SAMPLES, RATES, rival, rows_of, write

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
        # A step accepts the correct drafted tokens and emits one more, except at a run's end.
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
