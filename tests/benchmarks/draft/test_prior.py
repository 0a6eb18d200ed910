"""A fitted prior is what recordings of other families taught: it holds where they are alike, and knows of no other."""

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from benchmarks.draft.prior import NUM_FITTED, evaluate, fit, is_kin, lesson, main, read, replay
from benchmarks.draft.recording import Recording, record

from treering import Drafter, HistoryStore
from treering.data import Trajectory, render, write_trajectories
from treering.errors import InputError
from treering.history.features import FIRST, NUM_VOTES

NUM_ROLLOUT = 40


def trajectories(seed: int, *, share_right: float = 0.8, num_tasks: int = 12, num_samples: int = 4) -> list[Trajectory]:
    """Samples of a task write its text, and now and then, each by its own chance, a token that no other has."""
    rng = np.random.default_rng(seed)
    fresh = iter(range(10_000, 1_000_000))
    found = []
    for task in range(num_tasks):
        text = rng.permutation(9_000)[:NUM_ROLLOUT]
        for trial in range(num_samples):
            is_right = rng.random(NUM_ROLLOUT) < share_right
            tokens = [
                9_999,
                *(int(token) if right else next(fresh) for token, right in zip(text, is_right, strict=True)),
            ]
            mask = np.arange(NUM_ROLLOUT + 1) > 0
            found.append(Trajectory(task_id=str(task), trial=trial, tokens=np.array(tokens, np.int32), loss_mask=mask))
    return found


def recorded(seed: int, **options: float) -> Recording:
    found = trajectories(seed, **options)  # type: ignore[arg-type]
    return record(found, render(found))


def lessons() -> dict[str, np.ndarray]:
    return {name: lesson(recorded(seed)) for seed, name in enumerate(("a_one", "a_two", "b_one"))}


def test_estimates_come_true_early_where_the_prior_was_taught_by_recordings_of_the_same_kind() -> None:
    shares = (0.5, 0.9)
    taught = {
        share: fit({f"{seed}_": lesson(recorded(seed, share_right=share)) for seed in range(4)}) for share in shares
    }
    for share, other in (shares, shares[::-1]):
        unseen = recorded(9, share_right=share, num_tasks=40)
        error, error_of_other = (replay(unseen, taught[kind])["calibration_error_500"] for kind in (share, other))
        assert error < 0.1
        assert error < 0.7 * error_of_other


def test_a_lesson_is_the_same_every_time_and_leaves_what_was_not_used_as_it_was() -> None:
    found = recorded(0)
    first, second = lesson(found), lesson(found)
    assert (first == second).all()
    assert first.shape == (NUM_FITTED,)
    # Every rollout is of one version and has no reward: of the 24 ages and rewards, history's and live ones', that is
    # the first of each.
    ages = first[NUM_VOTES + FIRST[4] : NUM_VOTES + FIRST[5]]
    assert np.flatnonzero(ages).tolist() == [0, 12]
    assert np.isfinite(first).all()


def test_every_recording_counts_the_same() -> None:
    large, small = recorded(0, num_tasks=16), recorded(1, num_tasks=3)
    taught = {"a_": lesson(large), "b_": lesson(small)}
    np.testing.assert_allclose(fit(taught), (taught["a_"] + taught["b_"]) / 2, rtol=1e-12)
    # Sums of such numbers depend on their order; that of the files does not matter.
    far_apart = {name: np.full(NUM_FITTED, value) for name, value in (("a_", 1e16), ("b_", 1.0), ("c_", -1e16))}
    orders = permutations(far_apart.items())
    assert len({float(fit(dict(order))[0]) for order in orders}) == 1


def test_what_is_left_out_teaches_nothing_nor_does_its_family() -> None:
    taught = lessons()
    others = fit(taught, leave_out="a_three")
    assert (others == taught["b_one"]).all()
    changed = taught | {"a_one": np.full(NUM_FITTED, 1e6), "a_two": np.full(NUM_FITTED, np.nan)}
    assert (fit(changed, leave_out="a_one") == others).all()
    with pytest.raises(InputError, match="family of 'b_x'"):
        fit({"b_one": taught["b_one"]}, leave_out="b_x")
    assert is_kin("tot_game24_bfs", "tot_text_cot10")
    assert not is_kin("toolbench_dfsdt", "tot_text_cot10")


def test_the_left_out_row_does_not_change_with_what_its_own_recording_taught() -> None:
    recordings = {"a_": recorded(0), "b_": recorded(1)}
    taught = {name: lesson(recording) for name, recording in recordings.items()}
    spoilt = taught | {"a_": taught["a_"] - 3}

    def rows(given: dict[str, np.ndarray]) -> dict[tuple[str, str], dict[str, float]]:
        return {(row.pop("file"), row.pop("prior")): row for row in evaluate(recordings, given)}

    before, after = rows(taught), rows(spoilt)
    assert set(before) == {(n, p) for n in recordings for p in ("shipped", "fitted", "left_out")}
    same = {key for key in before if before[key] == after[key]}
    assert same == {("a_", "left_out")} | {(n, p) for n in recordings for p in ("shipped",)}


def test_rates_are_those_of_the_replay_and_errors_stay_out_where_too_little_was_tried() -> None:
    row = replay(recorded(0, num_tasks=2), None)
    assert row["tokens_per_step"] > 1.5
    assert row["precision"] == pytest.approx((row["tokens_per_step"] - 1) / row["drafted_per_step"], rel=0.1)
    assert row["calibration_error_2000"] is None
    assert 0 < row["calibration_error"] < 1


def test_a_written_prior_is_a_state_that_a_drafter_goes_on_from(tmp_path: Path) -> None:
    files = write(tmp_path, ["a_one", "b_one"])
    main([*files, "--out", str(tmp_path / "fitted.npz")])
    drafter = Drafter(HistoryStore())
    fresh = drafter.state()
    with np.load(tmp_path / "fitted.npz") as state:
        drafter.load_state(dict(state))
    weights = drafter.state().pop("weights")
    expected = fit({name: lesson(recorded(seed)) for seed, name in enumerate(("a_one", "b_one"))})
    assert (weights[:NUM_FITTED] == expected).all()
    assert (weights[NUM_FITTED:] == fresh["weights"][NUM_FITTED:]).all()
    assert all((drafter.state()[name] == fresh[name]).all() for name in ("squares", "reliability", "quiet"))


def write(folder: Path, names: Sequence[str]) -> list[str]:
    for seed, name in enumerate(names):
        write_trajectories(folder / f"{name}.jsonl", trajectories(seed))
    return [str(folder / f"{name}.jsonl") for name in names]


def test_a_file_that_is_left_out_is_not_even_read(tmp_path: Path) -> None:
    files = write(tmp_path, ["a_one", "b_one"])
    main([files[1], "--out", str(tmp_path / "alone.npz")])
    (tmp_path / "a_one.jsonl").write_text("no recording")
    main([*files, "--leave-out", "a", "--out", str(tmp_path / "left.npz")])
    assert (tmp_path / "left.npz").read_bytes() == (tmp_path / "alone.npz").read_bytes()
    with pytest.raises(SystemExit, match=r"draft_prior: .*a_one"):
        main([*files, "--out", str(tmp_path / "all.npz")])
    assert not (tmp_path / "all.npz").exists()


def test_the_command_tells_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, ["a_one", "b_one"])
    main([*files, "--evaluate", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["file"], row["prior"]) for row in rows] == [
        (name, which) for name in ("a_one", "b_one") for which in ("shipped", "fitted", "left_out")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert lines[-1].split()[:3] == ["b_one", "left_out", f"{rows[-1]['tokens_per_step']:.3f}"]


def test_bad_recordings_are_refused_with_what_to_do(tmp_path: Path) -> None:
    single = trajectories(0, num_samples=1)
    with pytest.raises(InputError, match="no task has a second one"):
        lesson(record(single, render(single)))
    with pytest.raises(InputError, match="told apart by file name"):
        read([tmp_path / "a.jsonl", tmp_path / "other" / "a.jsonl.gz"], None, 100)
