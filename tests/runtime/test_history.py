"""Workers that share no files with the controller draft from what it sends them, as others do from its folder."""

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from tests.runtime import tasks
from tests.runtime.runs import MAX_BATCH, Lopsided, TinyRecipe, pipeline
from tests.runtime.test_pipeline import rows_of
from treering.engine.protocol import EngineStats
from treering.engine.request import Sampling
from treering.engine.rollout import Rollout
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.history.features import Source
from treering.rl.drafting import Drafting, DraftOptions
from treering.runtime.ipc.local_launcher import LocalLauncher
from treering.runtime.ipc.messages import PromptHistories
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.pipeline import PipelineLoop

PER_EPOCH, NUM_STEPS = 3, 6
"""Steps: five prompts, two a step, twice."""

GREEDY = Sampling(max_tokens=12, top_k=1)
PATIENCE_S = 120.0


class Elsewhere(LocalLauncher):
    """Starts processes that see no files of the controller, as far as it knows."""

    shares_host = False


one_prompt = partial(tasks.Constant, 1)


def drafting(
    folder: Path | None = None, publish_new_after: int = 1000, sources: tuple[Source, ...] = ("history",)
) -> Drafting:
    """Drafts from the history of the rollout's own prompt alone, of earlier steps, unless other things are given."""
    options = DraftOptions(min_acceptance=0.01, sources=sources, publish_new_after=publish_new_after)
    return Drafting(options, folder)


def run(loop: PipelineLoop, num_steps: int = NUM_STEPS) -> tuple[list[EngineStats], list[list[tuple[object, ...]]]]:
    """What the engines counted in each step, and the rollouts."""
    engines, rows = [], []
    with loop:
        for _ in range(num_steps):
            engines.append(loop.step().engine)
            rows.append(rows_of(loop))
    return engines, rows


def drafts_of(engines: list[EngineStats]) -> list[tuple[int, int]]:
    return [(engine.num_drafted, engine.num_accepted) for engine in engines]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the controller sends to its processes."""
    sent: list[object] = []
    send = ChildProcess.send

    def noted(child: ChildProcess, message: object) -> None:
        sent.append(message)
        send(child, message)

    monkeypatch.setattr(ChildProcess, "send", noted)
    return sent


def test_sent_history_drafts_what_mapped_history_drafts(tmp_path: Path, messages: list[object]) -> None:
    # Equal rewards, so the weights stay: greedily, every rollout of a prompt is the same in both epochs.
    recipe = TinyRecipe(task=tasks.Constant)
    started = partial(pipeline, recipe, num_steps=NUM_STEPS, sampling=GREEDY)
    _, expected = run(started())
    mapped, mapped_rows = run(started(drafting=drafting(tmp_path / "mapped")))
    assert not any(isinstance(message, PromptHistories) for message in messages)
    sent, sent_rows = run(started(drafting=drafting(tmp_path / "unread"), launcher=Elsewhere()))
    assert sent_rows == mapped_rows == expected
    assert any(isinstance(message, PromptHistories) for message in messages)
    # Each rollout stays on its worker, and no clock decides what is drafted.
    assert drafts_of(sent) == drafts_of(mapped)
    first, second = sent[:PER_EPOCH], sent[PER_EPOCH:]
    assert all(engine.num_drafted == 0 for engine in first)
    # They repeat the first epoch: most tokens come from drafts.
    assert sum(engine.num_accepted for engine in second) > sum(engine.num_sampled for engine in second) / 2


def has_history(drafter: Drafter) -> bool:
    """Whether a worker has history of the only prompt."""
    return "p0" in drafter._store.snapshot


class Patient(TorchEngine):
    """Keeps its last rollout waiting until there is history, which only a finished sibling can have left."""

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
    """One prompt, greedily, with patient engines."""

    def make_engine(self, model: nn.Module, drafter: Drafter | None, version: int) -> TorchEngine:
        assert drafter is not None
        return Patient(model, drafter, version)


def test_siblings_of_a_new_prompt_draft_from_each_other_on_every_worker() -> None:
    # All rollouts but one are on the first worker; both wait with their last one.
    loop = pipeline(
        PatientRecipe(task=one_prompt),
        num_steps=1,
        policy=Lopsided(),
        drafting=drafting(publish_new_after=1),
        launcher=Elsewhere(),
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
    """The first worker that has history dies; `mark` tells the others that it is dead."""

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
            os.kill(os.getpid(), signal.SIGKILL)
        return TorchEngine.step(self)


def test_the_replacement_of_a_killed_worker_drafts_from_the_history_again(tmp_path: Path) -> None:
    loop = pipeline(
        MortalRecipe(task=one_prompt, mark=tmp_path / "dead"),
        num_steps=2,
        num_workers=1,
        drafting=drafting(),
        launcher=Elsewhere(),
        sampling=GREEDY,
        prompts_per_step=1,
    )
    engines, rows = run(loop, 2)
    assert rows[0] == rows[1]
    assert loop.account.worker_deaths == 1
    # The whole second step was sampled by the replacement.
    assert engines[1].num_accepted > engines[1].num_sampled / 2
