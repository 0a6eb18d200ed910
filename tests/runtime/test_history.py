"""Rollout workers draft from the history that the controller publishes into a folder, within a step and after."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from tests.runtime import tasks
from tests.runtime.in_process import die
from tests.runtime.runs import MAX_BATCH, Lopsided, TinyRecipe, pipeline
from tests.runtime.test_pipeline import rows_of
from treering.config.engine import DraftOptions
from treering.engine.protocol import EngineStats, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError
from treering.history.draft.drafter import Drafter
from treering.rl.drafting import Drafting
from treering.runtime.pipeline import PipelineLoop

PER_EPOCH, NUM_STEPS = 3, 6
"""Steps: five prompts, two a step, twice."""

GREEDY = Sampling(max_tokens=12, top_k=1)
PATIENCE_S = 120.0


one_prompt = partial(tasks.Constant, 1)


def drafting(folder: Path, publish_new_after: int = 1000) -> Drafting:
    """Return a drafting from the history of the rollout's own prompt, of earlier steps unless more is published."""
    options = DraftOptions(min_acceptance=0.01, sources=("history",), publish_new_after=publish_new_after)
    return Drafting(options, folder)


def run(loop: PipelineLoop, num_steps: int = NUM_STEPS) -> tuple[list[EngineStats], list[list[tuple[object, ...]]]]:
    """Return the engines' counts for each step, and the rollouts."""
    engines, rows = [], []
    with loop:
        for _ in range(num_steps):
            engines.append(loop.step().engine)
            rows.append(rows_of(loop))
    return engines, rows


def test_the_second_epoch_is_drafted_from_the_first(tmp_path: Path) -> None:
    # Equal rewards, so the weights stay and every greedy rollout of a prompt is the same in both epochs.
    started = partial(pipeline, TinyRecipe(task=tasks.Constant), num_steps=NUM_STEPS, sampling=GREEDY)
    _, expected = run(started())
    engines, rows = run(started(drafting=drafting(tmp_path)))
    assert rows == expected
    first, second = engines[:PER_EPOCH], engines[PER_EPOCH:]
    assert all(engine.num_drafted == 0 for engine in first)
    # They repeat the first epoch, so most tokens come from drafts.
    assert sum(engine.num_accepted for engine in second) > sum(engine.num_sampled for engine in second) / 2


def test_a_history_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="set a folder"):
        pipeline(num_steps=1, drafting=Drafting())


def has_history(drafter: Drafter) -> bool:
    """Return whether a worker has history of the only prompt."""
    return "p0" in drafter._store.snapshot


class Patient(TorchEngine):
    """Engine that holds its last rollout back until there is history, which only a finished sibling can have left."""

    def __init__(self, model: nn.Module, drafter: Drafter, version: int) -> None:
        super().__init__(model, drafter, max_batch=MAX_BATCH, max_tokens=200, version=version, costs="none")
        self._read = drafter
        self._end_s = time.monotonic() + PATIENCE_S

    def step(self) -> list[Rollout]:
        if self.num_unfinished == 1 and not has_history(self._read) and time.monotonic() < self._end_s:
            # The worker takes its messages between passes.
            return []
        return super().step()


class PatientRecipe(TinyRecipe):
    """Recipe of one prompt, greedily, with patient engines."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        assert drafter is not None
        return Patient(model, drafter, version)


def test_siblings_of_a_new_prompt_draft_from_each_other_on_every_worker(tmp_path: Path) -> None:
    # All rollouts but one are on the first worker; both workers hold their last one back.
    loop = pipeline(
        PatientRecipe(task=one_prompt),
        num_steps=1,
        policy=Lopsided(),
        drafting=drafting(tmp_path, publish_new_after=1),
        sampling=GREEDY,
        prompts_per_step=1,
        rebalancing="none",
    )
    engines, rows = run(loop, 1)
    num_tokens = len(rows[0][0][2])  # type: ignore[arg-type]
    assert engines[0].num_accepted > num_tokens / 2
    assert loop.account.worker_deaths == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MortalRecipe(TinyRecipe):
    """Recipe in which the first worker that has history dies; `mark` records this for the others."""

    mark: Path

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        assert drafter is not None
        return Mortal(model, drafter, version, self.mark)


class Mortal(Patient):
    def __init__(self, model: nn.Module, drafter: Drafter, version: int, mark: Path) -> None:
        super().__init__(model, drafter, version)
        self._mark = mark

    def step(self) -> list[Rollout]:
        if has_history(self._read) and not self._mark.exists():
            self._mark.touch()
            die()
        return TorchEngine.step(self)


def test_the_replacement_of_a_killed_worker_drafts_from_the_history_again(tmp_path: Path) -> None:
    loop = pipeline(
        MortalRecipe(task=one_prompt, mark=tmp_path / "dead"),
        num_steps=2,
        num_workers=1,
        drafting=drafting(tmp_path / "history"),
        sampling=GREEDY,
        prompts_per_step=1,
    )
    engines, rows = run(loop, 2)
    assert rows[0] == rows[1]
    assert loop.account.worker_deaths == 1
    # The replacement sampled the whole second step.
    assert engines[1].num_accepted > engines[1].num_sampled / 2
