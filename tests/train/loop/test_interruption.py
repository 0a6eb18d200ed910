"""A run that a signal ends saves its last whole step and resumes to bitwise the same weights."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import build
from tests.train.loop.runs import assert_bitwise_equal, store, tensors_of, tiny_loop
from treering.errors import Interrupted
from treering.metrics import Metrics
from treering.ranks.group import RankGroup
from treering.train.loop import saved_run
from treering.train.loop.checkpoint import Resumable, StepReport
from treering.train.loop.held_out import Evaluation
from treering.train.loop.saved_run import Interruption, open_run, run_steps
from treering.train.loop.sft_loop import SftLoop
from treering.train.progress import OnProgress, Phase

NUM_STEPS = 4


def train(folder: Path, loop: Resumable[Any], *, signal_at: int | None = None) -> Interrupted | None:
    """Train until a signal at the n-th progress call; return the exception that ended the run."""
    interruption, num_words = Interruption(RankGroup()), 0

    def hear(phase: Phase, num_done: int, num_total: int) -> None:
        nonlocal num_words
        num_words += 1
        if num_words == signal_at:
            interruption.request(signal.SIGTERM)

    loop.on_progress = interruption.checked(hear)
    checkpoints = store(folder / "checkpoints")
    open_run(folder, loop, checkpoints)
    steps = run_steps(
        loop,
        num_steps=NUM_STEPS,
        save_every=timedelta(hours=1),
        checkpoints=checkpoints,
        metrics=Metrics([]),
        interruption=interruption,
    )
    try:
        list(steps)
    except Interrupted as error:
        return error
    return None


def in_small_batches() -> SftLoop:
    return tiny_loop(build(), max_batch_tokens=100)


def test_a_run_ended_between_micro_batches_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = in_small_batches()
    words: list[int] = []
    whole.on_progress = lambda _, num_done, __: words.append(num_done)
    while whole.num_steps_done < NUM_STEPS:
        whole.step()
    first, last = words.index(0, 1), len(words) - 1
    assert last - first > 2 * NUM_STEPS, "each step has several micro-batches"
    # The last progress call of the first step comes before its update.
    for moment in range(first + 1, last, 9):
        folder = tmp_path / str(moment)
        # The progress call during which the signal arrives is delivered; the next one is not.
        dropped = in_small_batches()
        ended, step = train(folder, dropped, signal_at=moment), words[: moment + 1].count(0) - 1
        assert ended is not None
        assert all(weight.grad is None for weight in dropped.model.parameters())
        assert ended.signal_number == signal.SIGTERM
        assert ended.__notes__ == [f"step {step} is saved and {step + 1} is next"]
        rest = in_small_batches()
        assert train(folder, rest) is None
        assert_bitwise_equal(tensors_of(rest), tensors_of(whole))


def test_a_signal_during_the_last_evaluation_ends_the_run_after_its_last_step_is_saved(tmp_path: Path) -> None:
    loop, interruption, checkpoints = tiny_loop(), Interruption(RankGroup()), store(tmp_path / "checkpoints")

    def measure(on_progress: OnProgress | None) -> dict[str, float]:
        if loop.num_steps_done == 2:
            interruption.request(signal.SIGTERM)
        interruption.checked(lambda *_: None)("scoring", 1, 2)
        return {"eval/loss": 1.0}

    steps = run_steps(
        loop,
        num_steps=2,
        save_every=None,
        checkpoints=checkpoints,
        metrics=Metrics([]),
        evaluation=Evaluation(measure=measure),
        interruption=interruption,
    )
    assert [next(steps).step, next(steps).step] == [1, 2]
    assert (tmp_path / "checkpoints" / "step-000002").exists()
    with pytest.raises(Interrupted) as ended:
        next(steps)
    assert ended.value.__notes__ == ["step 2 is saved, and was not evaluated"]


def test_a_signal_need_not_wait_if_everything_is_saved(tmp_path: Path) -> None:
    interruption, loop, checkpoints = Interruption(RankGroup()), tiny_loop(), store(tmp_path / "checkpoints")
    steps = run_steps(
        loop, num_steps=3, save_every=2, checkpoints=checkpoints, metrics=Metrics([]), interruption=interruption
    )
    # Nothing is unsaved before the first step and after the second.
    waits = [interruption.has_unsaved(), *(interruption.has_unsaved() for _ in steps)]
    assert waits == [False, True, False, False]


class Drawing(Resumable[StepReport]):
    """Loop that adds random numbers to its weight, some of them before the point where a step can end."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = build()
        self._num_steps_done = 0

    @property
    def num_steps_done(self) -> int:
        return self._num_steps_done

    def step(self) -> StepReport:
        drawn = torch.rand(1)
        assert self.on_progress is not None
        for num_done in range(3):
            self.on_progress("training", num_done, 2)
        with torch.no_grad():
            next(self.model.parameters()).add_(drawn)
        self._num_steps_done += 1
        return _Report(step=self._num_steps_done)  # type: ignore[return-value]

    def state(self) -> dict[str, Any]:
        return {"num_steps_done": self._num_steps_done}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._num_steps_done = state["num_steps_done"]


class _Report:
    def __init__(self, step: int) -> None:
        self.step = step

    def values(self) -> dict[str, float]:
        return {}


def test_random_numbers_of_the_dropped_step_are_drawn_again(tmp_path: Path) -> None:
    whole, rest = Drawing(), Drawing()
    assert train(tmp_path / "whole", whole) is None
    assert train(tmp_path / "ended", Drawing(), signal_at=5) is not None
    assert train(tmp_path / "ended", rest) is None
    assert_bitwise_equal(dict(rest.model.state_dict()), dict(whole.model.state_dict()))


class Failing(Drawing):
    """Loop whose engine process also dies of Ctrl-C, in the third step."""

    def step(self) -> StepReport:
        if self.num_steps_done == 2:
            assert self.on_progress is not None
            with suppress(Interrupted):
                self.on_progress("training", 0, 1)
                self.on_progress("training", 1, 1)
            raise RuntimeError("the engine is gone")
        return super().step()


def test_a_step_that_fails_at_the_signal_is_dropped_like_others(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the engine is gone"):
        train(tmp_path / "failed", Failing())
    ended = train(tmp_path / "ended", Failing(), signal_at=7)
    assert ended is not None
    assert ended.__notes__ == ["step 2 is saved and 3 is next"]
    assert isinstance(ended.__cause__, RuntimeError)


@pytest.mark.parametrize(("cost_s", "saved"), [(1.0, [3, 6, 9, 10]), (20.0, [3, 7, 10])])
def test_a_run_saves_by_time_and_less_often_where_that_is_dear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_s: float, saved: list[int]
) -> None:
    """Steps take 100 s. One is saved every 250 s, but at least 19 times the cost of saving lies between two saves."""
    now_s, saves = 0.0, list[int]()

    class Slow(Drawing):
        on_progress = staticmethod(lambda *_: None)

        def step(self) -> StepReport:
            nonlocal now_s
            now_s += 100.0
            return super().step()

        def state(self) -> dict[str, Any]:
            nonlocal now_s
            now_s += cost_s
            saves.append(self.num_steps_done)
            return super().state()

    monkeypatch.setattr(saved_run, "time", SimpleNamespace(monotonic=lambda: now_s))
    steps = run_steps(
        Slow(),
        num_steps=10,
        save_every=timedelta(seconds=250),
        checkpoints=store(tmp_path / "checkpoints"),
        metrics=Metrics([]),
    )
    assert len(list(steps)) == 10
    assert saves == saved
