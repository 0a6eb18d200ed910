"""Ours at no more drafts than a rival, in the reports of `python -m benchmarks draft`."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from benchmarks.draft import bench as draft
from benchmarks.draft import budgets as draft_budgets
from benchmarks.draft.drafters import arctic as draft_arctic

from tests.benchmarks.draft.drafting import rival, rows_of, write
from treering import Drafter


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: False)


Tried = list[tuple[str, float, dict[str, Any]]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    """What is replayed of ours: history, least acceptance (-1 for the shipped one) and rates."""
    found: Tried = []
    measured, made = draft_budgets.replay_rows, draft_budgets.make_drafter
    least = {"min_acceptance": 0.0}

    def make(*given: Any, min_acceptance: float = -1.0) -> Drafter:
        least["min_acceptance"] = min_acceptance
        return made(*given, min_acceptance=min_acceptance if min_acceptance > 0 else None)

    def watched(recording: Any, plan: Any, *given: Any) -> Any:
        tally = measured(recording, plan, *given)
        row = tally.row()
        del row["reliability"]  # a table of its own in a report
        found.append((plan.history, least["min_acceptance"], row))
        return tally

    monkeypatch.setattr(draft_budgets, "make_drafter", make)
    monkeypatch.setattr(draft_budgets, "replay_rows", watched)
    return found


def check_matched(report: dict[str, Any], tried: Tried, history: str, limit: float) -> None:
    """`treering` gains the most of all that were tried and draft no more than the limit, `treering_shipped` stands."""
    rows = rows_of(report)
    own = {least: one for name, least, one in tried if name == history}
    row, shipped = rows["treering", history], rows["treering_shipped", history]
    assert row["tokens_per_step"] == max(
        one["tokens_per_step"] for one in own.values() if one["drafted_per_step"] <= limit
    )
    told = row.get("config", {"min_acceptance": -1.0})["min_acceptance"]
    assert told != signature(Drafter).parameters["min_acceptance"].default
    assert own[told]["drafted_per_step"] == row["drafted_per_step"] <= limit
    assert own[-1.0].items() <= shipped.items()
    assert "config" not in shipped


def test_with_a_rival_ours_drafts_no_more_than_its_best_row_and_the_shipped_one_stands_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    # The best one drafts neither the most nor the least; another one would be matched elsewhere.
    rival(monkeypatch, [(1.5, 9.0), (2.0, 3.0), (1.9, 1.0)])
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering"])
    assert report["notes"] == []
    for history in ("none", "siblings", "wrong_task"):
        rows = [row for row in report["drafters"] if row["history"] == history]
        assert [row["drafter"] for row in rows] == ["arctic"] * 3 + ["treering", "treering_shipped"]
        check_matched(report, tried, history, 3.0)
        assert [one.get("ratio_to_best_arctic") for one in rows[:3]] == [None] * 3
        assert [one["ratio_to_best_arctic"] for one in rows[3:]] == [one["tokens_per_step"] / 2 for one in rows[3:]]
    assert any(row["drafted_per_step"] > 3 for _, least, row in tried if least < 0)


def test_a_number_of_drafts_to_match_takes_the_place_of_a_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    file = write(tmp_path)
    report = draft.measure(file=file, drafters=["treering"], match_drafts=2.5)
    assert report["environment"]["match_drafts"] == 2.5
    check_matched(report, tried, "siblings", 2.5)
    alone = rows_of(report)["treering", "siblings"]
    assert "ratio_to_best_arctic" not in alone
    rival(monkeypatch, [(2.0, 9.0)])
    report = draft.measure(file=file, drafters=["arctic", "treering"], match_drafts=2.5)
    beside = rows_of(report)["treering", "siblings"]
    assert beside["drafted_per_step"] == alone["drafted_per_step"]
    assert beside["ratio_to_best_arctic"] == alone["tokens_per_step"] / 2


def test_without_a_rival_ours_is_as_shipped_and_has_one_row(tmp_path: Path, tried: Tried) -> None:
    report = draft.measure(file=write(tmp_path), drafters=["treering"])
    assert [row["drafter"] for row in report["drafters"]] == ["treering"] * 3
    assert [least for _, least, _ in tried] == [-1.0] * 3


def test_where_nothing_drafts_as_little_as_the_rival_there_is_the_shipped_row_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival(monkeypatch, [(1.0, 1e-9)])
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering"])
    rows = [row for row in report["drafters"] if row["history"] == "siblings"]
    assert [row["drafter"] for row in rows] == ["arctic", "treering_shipped"]
    assert rows[1]["ratio_to_best_arctic"] == rows[1]["tokens_per_step"] > 1
    assert [note.split(" no min_acceptance")[0] for note in report["notes"]] == ["with history siblings"]
    # Elsewhere nothing is as sure, and a high enough acceptance drafts nothing at all.
    assert ("treering", "none") in rows_of(report)
