"""Law 8 with processes: a run resumed from a checkpoint ends with bitwise the weights of an uninterrupted one."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.models import build_float64
from tests.rl.runs import sampling_loop, steps_in, store
from tests.runtime.runs import pipeline
from tests.runtime.test_pipeline import CLOSE, rows_of
from treering.errors import Interrupted, StateError
from treering.ranks.group import RankGroup
from treering.rl.loop import RlLoop
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.histopipe import make_policy
from treering.train.loop.saved_run import Interruption, open_run
from treering.train.progress import Phase

NUM_STEPS = 6


def train(
    loop: PipelineLoop | RlLoop, folder: Path, stop_after: int | None = None, save_every: int | None = 1
) -> list[list[tuple[object, ...]]]:
    """Train in a folder, resuming an existing run; return the rollouts of this call's steps.

    Without `save_every` a signal comes while the step after `stop_after` is sampled.
    """
    interruption, rows = Interruption(RankGroup()), []

    def hear(phase: Phase, num_done: int, num_total: int) -> None:
        if phase == "sampling" and save_every is None and loop.num_steps_done == stop_after and num_done > 0:
            interruption.request(signal.SIGTERM)

    loop.on_progress = interruption.checked(hear)
    with suppress(Interrupted):
        for report in steps_in(folder, loop, NUM_STEPS, save_every=save_every, interruption=interruption):
            rows.append(rows_of(loop))
            if report.step == stop_after and save_every is not None:
                break
    return rows


def dealt_out(staleness: int) -> PipelineLoop:
    return pipeline(num_steps=NUM_STEPS, staleness=staleness)


def planned(staleness: int) -> PipelineLoop:
    policy = make_policy("histopipe")
    return pipeline(num_steps=NUM_STEPS, staleness=staleness, policy=policy, rebalancing="none")


@pytest.mark.parametrize(("make", "staleness", "save_every"), [(dealt_out, 2, 1), (planned, 1, None)])
def test_a_stale_run_resumes_bitwise(
    make: Callable[[int], PipelineLoop], staleness: int, save_every: int | None, tmp_path: Path
) -> None:
    with make(staleness) as whole:
        expected = train(whole, tmp_path / "whole")
    with make(staleness) as first:
        rows = train(first, tmp_path / "stopped", stop_after=3, save_every=save_every)
    # The same at a signal while a step is sampled as at a stop between steps.
    assert len(rows) == 3
    with make(staleness) as second:
        rows += train(second, tmp_path / "stopped")
        assert second.num_steps_done == NUM_STEPS
    assert rows == expected
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name
    # The account covers the whole run, without the unfinished rollouts of the interrupted one.
    assert second.account == whole.account


def test_a_resumed_run_with_rehearsals_samples_the_same_tokens(tmp_path: Path) -> None:
    # Rehearsed tokens stay in the workers and are lost, so the resumed step rounds as without them.
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on") as whole:
        expected = train(whole, tmp_path / "whole")
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on") as first:
        rows = train(first, tmp_path / "stopped", stop_after=3)
    with pipeline(num_steps=NUM_STEPS, num_workers=1, rehearse="on") as second:
        rows += train(second, tmp_path / "stopped")
    assert rows == expected
    for name, tensor in whole.model.state_dict().items():
        assert (second.model.state_dict()[name] - tensor).abs().max() <= CLOSE, name


def test_a_run_changes_between_one_process_and_several(tmp_path: Path) -> None:
    expected = train(sampling_loop(build_float64("llama")), tmp_path / "plain")
    rows = train(sampling_loop(build_float64("llama")), tmp_path / "mixed", stop_after=2)
    with pipeline(num_steps=NUM_STEPS) as loop:
        rows += train(loop, tmp_path / "mixed", stop_after=4)
    last = sampling_loop(build_float64("llama"))
    rows += train(last, tmp_path / "mixed")
    assert rows == expected
    plain = sampling_loop(build_float64("llama"))
    open_run(tmp_path / "plain", plain, store(tmp_path / "plain"))
    for name, tensor in plain.model.state_dict().items():
        assert (last.model.state_dict()[name] - tensor).abs().max() <= CLOSE, name


def test_missing_weights_of_later_steps_are_refused(tmp_path: Path) -> None:
    train(sampling_loop(build_float64("llama")), tmp_path, stop_after=2)
    with pipeline(num_steps=NUM_STEPS, staleness=1) as loop, pytest.raises(StateError, match=r"\[1\]"):
        open_run(tmp_path, loop, store(tmp_path))


def test_a_checkpoint_of_an_earlier_version_is_refused() -> None:
    with pipeline(num_steps=NUM_STEPS) as loop:
        state = {"num_steps_done": 1, "version": 1, "draws": {}, "optimizer": None}
        past = [{"step": 0, "label": 0, "weights": {}}]
        planners = {"told": []}, {"observed": [], "lengths": {"name": "ema"}}
        for other in ({"account": {"judged": 8}}, {"past": past}, *({"planner": planner} for planner in planners)):
            with pytest.raises(StateError, match="written by an earlier version"):
                loop.load_state(state | other)


def test_the_history_is_resumed_with_the_run(tmp_path: Path) -> None:
    for part in ("first", "second"):
        with pipeline(num_steps=NUM_STEPS, history=tmp_path / part) as loop:
            train(loop, tmp_path / "run", stop_after=4 if part == "first" else None)
            assert loop._drafting is not None
            sizes = {name: index.num_tokens for name, index in loop._drafting.store.snapshot.items()}
        if part == "first":
            saved = sizes
    assert sizes.keys() == saved.keys()
    assert sum(sizes.values()) > sum(saved.values()) > 0
