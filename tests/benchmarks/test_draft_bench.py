"""The whole of `treering bench draft` on small files: which rows there are, and what is refused."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import draft, draft_arctic
from benchmarks.draft_equal import SAME_DRAFTS

from treering import Drafter
from treering.data import AgentSpec, Trajectory, generate_trajectories, write_trajectories
from treering.errors import InputError

RATES = {"tokens_per_step", "drafted_per_step", "precision", "us_per_row", "us_per_row_p95", "bytes_per_token"}
HISTORY_DRAFTERS = ["naive", "paper", "released", "treering", "treering_chain"]
NUM_SAMPLES = 6
ABLATION = ["treering_frequency", "treering_reward", "treering_recency"]


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: False)


def write(folder: Path, *, epochs: int | None = None, rewards: bool = False) -> Path:
    """Two tasks with six samples each (in each epoch) that resemble one another."""
    generator = np.random.default_rng(0)
    given = []
    for task in ("a", "b"):
        pattern = generator.integers(0, 500, 40).astype(np.int32)
        for epoch in range(epochs or 1):
            for sample in range(NUM_SAMPLES):
                tokens = np.where(generator.random(40) < 0.1, generator.integers(0, 500, 40), pattern).astype(np.int32)
                reward = float(sample) if rewards else None
                mask = np.arange(40) >= 4
                given.append(
                    Trajectory(
                        task_id=task, tokens=tokens, loss_mask=mask, reward=reward, epoch=epoch if epochs else None
                    )
                )
    file = folder / "rollouts.jsonl.gz"
    write_trajectories(file, given)
    return file


def rows_of(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["drafter"], row["history"]): row for row in report["drafters"]}


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
    assert controls == [("treering", "earlier", "true_age"), ("treering", "earlier", "shuffled_age")]
    assert ("naive", "earlier") in rows_of(report)
    assert report["environment"]["num_generations"] == 4


def test_rewards_are_a_priority_where_all_are_known(tmp_path: Path) -> None:
    report = draft.measure(file=write(tmp_path, rewards=True), drafters=["paper"])
    assert [row["config"]["priority"] for row in report["drafters"]] == ["reward", "frequency"] * 2
    report = draft.measure(file=write(tmp_path), drafters=["paper"])
    assert [row["config"]["priority"] for row in report["drafters"]] == ["frequency"] * 2


def test_rows_have_a_predicted_speedup_where_costs_are_given(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"num_tokens": [1, 1000], "seconds": [1000.0, 1000.0]}')
    report = draft.measure(file=write(tmp_path), drafters=["none", "naive"], cost=costs, batch=2)
    for row in report["drafters"]:
        # A pass costs the same whatever is in it, and so much that drafting is nothing.
        assert row["predicted_speedup"] == pytest.approx(row["tokens_per_step"], rel=1e-3)
    assert report["environment"]["batch"] == 2


def test_with_costs_ours_is_replayed_once_more_knowing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"num_tokens": [1, 1000], "seconds": [1.0, 2.0]}')
    known: list[list[float]] = []
    sizes: list[int] = []
    use_costs, propose = Drafter.use_costs, Drafter.propose
    monkeypatch.setattr(
        Drafter, "use_costs", lambda drafter, given: known.append(given.seconds.tolist()) or use_costs(drafter, given)
    )
    monkeypatch.setattr(
        Drafter, "propose", lambda drafter, rows: sizes.append(len(rows.prompt_ids)) or propose(drafter, rows)
    )
    report = draft.measure(file=write(tmp_path), drafters=["treering"], cost=costs, batch=1)
    for history in ("none", "siblings", "wrong_task"):
        rows = [row for row in report["drafters"] if row["history"] == history]
        assert [row.get("config") for row in rows] == [None, {"costs": "known"}]
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


def test_ours_is_replayed_once_more_at_the_drafts_of_the_best_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: True)
    # The best one drafts neither the most nor the least; another one would be matched elsewhere.
    rates = [(1.5, 9.0), (2.0, 3.0), (1.9, 1.0)]

    def replay(*given: Any) -> list[dict[str, Any]]:
        rows = [{"tokens_per_step": tokens, "drafted_per_step": drafted} for tokens, drafted in rates]
        return [dict.fromkeys(RATES, 1.0) | row | {"config": {}} for row in rows]

    tried: list[tuple[str, float, dict[str, Any]]] = []
    measured, made = draft.replay_rows, draft.make_drafter
    least = {"min_acceptance": 0.0}

    def make(*given: Any, min_acceptance: float = -1.0) -> Drafter:
        least["min_acceptance"] = min_acceptance
        return made(*given, min_acceptance=min_acceptance if min_acceptance > 0 else None)

    def watched(recording: Any, plan: Any, *given: Any) -> Any:
        tally = measured(recording, plan, *given)
        tried.append((plan.history, least["min_acceptance"], tally.row()))
        return tally

    monkeypatch.setattr(draft_arctic, "replay_arctic", replay)
    monkeypatch.setattr(draft, "make_drafter", make)
    monkeypatch.setattr(draft, "replay_rows", watched)
    report = draft.measure(file=write(tmp_path), drafters=["arctic", "treering"])
    for history in ("none", "siblings", "wrong_task"):
        rows = [row for row in report["drafters"] if row["history"] == history]
        assert [row["drafter"] for row in rows] == ["arctic"] * 3 + ["treering", SAME_DRAFTS]
        row = rows[-1]
        assert row["drafted_per_step"] <= 3.0
        own = {least: one for name, least, one in tried if name == history}
        assert len(own) > 3
        assert row["tokens_per_step"] == max(
            one["tokens_per_step"] for one in own.values() if one["drafted_per_step"] <= 3
        )
        default = signature(Drafter).parameters["min_acceptance"].default
        told = row["config"]["min_acceptance"]
        assert own[-1.0 if told == default else told]["drafted_per_step"] == row["drafted_per_step"]
        assert [one.get("ratio_to_best_arctic") for one in rows[:3]] == [None] * 3
        assert [one["ratio_to_best_arctic"] for one in rows[3:]] == [one["tokens_per_step"] / 2 for one in rows[3:]]
    assert any(row["drafted_per_step"] > 3 for _, least, row in tried if least < 0)


def test_turns_of_an_agent_are_replayed_as_runs(tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    given = list(generate_trajectories(AgentSpec(num_tasks=2, num_trials=3, vocab_size=500, seed=0)))
    write_trajectories(file, given)
    report = draft.measure(file=file, drafters=["none", "naive", "treering"])
    sampled = sum(int(one.loss_mask.sum()) for one in given if one.loss_mask is not None)
    assert report["environment"]["num_sampled_tokens"] == sampled
    assert rows_of(report)["treering", "siblings"]["tokens_per_step"] > 1.0


def test_bad_input_is_refused_in_words_before_anything_is_replayed(tmp_path: Path) -> None:
    file = write(tmp_path)
    for options, words in (
        ({"drafters": ["naive", "best"]}, "--drafters are some of none, ngram.*got best"),
        ({"drafters": []}, "--drafters are some of"),
        ({"max_draft": 0}, "--max-draft must be at least 1, got 0"),
        ({"limit_tokens": -1}, "--limit-tokens must be at least 1, got -1"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"cost": tmp_path / "absent.json"}, "absent.json"),
        ({"file": tmp_path / "absent.jsonl"}, "absent.jsonl"),
    ):
        with pytest.raises(InputError, match=words):
            draft.measure(**{"file": file} | options)
