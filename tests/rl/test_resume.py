"""Law 8 with rollouts: a killed run ends with bitwise the weights, history and rollouts of an uninterrupted one.

Law 7: a lost history costs only speed.
"""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.killing import NUM_MOMENTS, reports_of
from tests.models import build_float64
from tests.rl.killed_runs import NUM_STEPS, SAVE_EVERY
from tests.rl.runs import eager, memory_of, sampling_loop, steps_in
from treering.errors import Interrupted
from treering.ranks.group import RankGroup
from treering.rl.drafting import Drafting
from treering.train.loop.saved_run import Interruption
from treering.train.progress import Phase


@pytest.mark.slow
def test_a_run_killed_at_any_file_operation_ends_bitwise_as_one_that_was_not(tmp_path: Path) -> None:
    reports = reports_of("tests.rl.killed_runs", tmp_path)
    whole, *killed = reports
    assert len(killed) == NUM_MOMENTS + 1
    assert [report["num_kills"] for report in killed[:-1]] == [1] * NUM_MOMENTS
    assert killed[-1]["num_kills"] > 1
    assert {report["digest"] for report in killed} == {whole["digest"]}
    for report in reports:
        assert report["steps"] == list(range(1, NUM_STEPS + 1)), "metrics hold each step once"
        assert report["losses"] == whole["losses"]


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_run_stopped_after_any_step_goes_on_as_if_it_had_not(tmp_path: Path, stop: int) -> None:
    memories = [eager() for _ in range(3)]
    whole = train(tmp_path / "whole", memory=memories[0])
    train(tmp_path / "stopped", stop_after=stop, memory=memories[1])
    stopped = train(tmp_path / "stopped", memory=memories[2])
    # The drafter's state depends on every draft; rounding could hide drafts that differ.
    for ours, theirs in ((stopped, whole), (memory_of(memories[2]), memory_of(memories[0]))):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    left, right = (rollouts_of(tmp_path / name) for name in ("whole", "stopped"))
    assert left == right


@pytest.mark.parametrize("phase", ["sampling", "training"])
def test_a_run_that_a_signal_ends_in_a_step_goes_on_as_if_it_had_not(tmp_path: Path, phase: str) -> None:
    memories = [eager() for _ in range(3)]
    whole = train(tmp_path / "whole", memory=memories[0])
    with pytest.raises(Interrupted) as ended:
        train(tmp_path / "ended", memory=memories[1], signal_in=(SAVE_EVERY + 1, phase))
    assert ended.value.__notes__ == [f"step {SAVE_EVERY + 1} is saved and {SAVE_EVERY + 2} is next"]
    # Drafts of the dropped step are forgotten, and so is what the drafter has learnt from them.
    resumed = train(tmp_path / "ended", memory=memories[2])
    for ours, theirs in ((resumed, whole), (memory_of(memories[2]), memory_of(memories[0]))):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert rollouts_of(tmp_path / "ended") == rollouts_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["gone", "cut", "foreign"])
def test_a_damaged_history_costs_a_warning_and_no_token(tmp_path: Path, damage: str) -> None:
    whole = train(tmp_path / "whole")
    train(tmp_path / "damaged", stop_after=4)
    file = tmp_path / "damaged" / "history" / "step-000004"
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-1] if damage == "cut" else b"a letter to the editor")
    with pytest.warns(UserWarning, match=file.name):
        resumed = train(tmp_path / "damaged")
    assert rollouts_of(tmp_path / "damaged") == rollouts_of(tmp_path / "whole")
    # Drafts change the shapes that are computed in, hence the rounding of stored log-probs.
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-9)


def test_a_run_goes_on_with_drafts_off_and_on_again(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "changed", stop_after=3)
    train(tmp_path / "changed", stop_after=6, drafts=False)
    with pytest.warns(UserWarning, match="step-000006"):
        train(tmp_path / "changed")
    assert rollouts_of(tmp_path / "changed") == rollouts_of(tmp_path / "whole")


def train(
    folder: Path,
    *,
    stop_after: int | None = None,
    drafts: bool = True,
    memory: Drafting | None = None,
    signal_in: tuple[int, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the weights in float64 after training, possibly stopped early, or by a signal in a phase after a step."""
    loop = sampling_loop(build_float64(), (memory or eager()) if drafts else None)
    interruption = Interruption(RankGroup())

    def hear(phase: Phase, num_done: int, num_total: int) -> None:
        # Some rollouts are sampled, or all are and none is trained.
        if (loop.num_steps_done, phase) == signal_in and (num_done > 0 or phase == "training"):
            interruption.request(signal.SIGTERM)

    loop.on_progress = interruption.checked(hear)
    for report in steps_in(folder, loop, NUM_STEPS, save_every=SAVE_EVERY, interruption=interruption):
        if report.step == stop_after:
            break
    return dict(loop.model.state_dict())


def rollouts_of(folder: Path) -> list[tuple[object, ...]]:
    """Return file, step, prompt, sample, tokens and version of every rollout of a run."""
    keys = ("step", "epoch", "task_id", "trial", "tokens", "version")
    return [
        (file.name, *(json.dumps(row[key]) for key in keys))
        for file in sorted((folder / "rollouts").iterdir())
        for row in map(json.loads, file.read_text().splitlines())
    ]
