"""A tiny task, engines and loops shared by the RL tests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.engine.scripted import ScriptedEngine
from tests.models import VOCAB, build
from treering.config.engine import DraftOptions
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Request, Rollout, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.metrics import METRICS_FILE, JsonlSink, Metrics
from treering.rl.drafting import Drafting
from treering.rl.loop import EngineFactory, RlLoop
from treering.rl.step_report import RlStepReport, RolloutLog
from treering.rl.tasks.task import Prompt, Task
from treering.train.loop.checkpoint import CheckpointStore, Resumable
from treering.train.loop.other_models import MakeReference
from treering.train.loop.saved_run import open_run, run_steps

STOP = 0
IDENTITY = {"task": "tiny", "rl.seed": 0}
SAMPLING = Sampling(max_tokens=12)
PLAIN = OptimOptions(learning_rate=1e-2, weight_decay=0.1, eps=1e-4, max_grad_norm=0.5)
Reward = Callable[[Rollout], float]


def share_of_even_tokens(rollout: Rollout) -> float:
    """A reward that differs between rollouts and rises with training."""
    return float((rollout.tokens % 2 == 0).mean())


class TinyTask(Task):
    """Task with prompts of a few tokens each, whose reward depends only on the rollout."""

    def __init__(self, num_prompts: int = 5, reward: Reward = share_of_even_tokens, names: Sequence[str] = ()) -> None:
        self._reward = reward
        self._prompts = [
            Prompt(
                prompt_id=names[i] if names else f"p{i}",
                tokens=np.array([3 + i, 7, *range(11, 12 + i % 3)], np.int32),
            )
            for i in range(num_prompts)
        ]

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (STOP,)

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        return self._reward(rollout)


def script(request: Request) -> list[int]:
    """Return tokens that depend on prompt, draw and sample, and that share a beginning within a group."""
    seed = [ord(symbol) for symbol in str(request.prompt_id)]
    common = np.random.default_rng([*seed, request.draw]).integers(1, VOCAB, size=3)
    own = np.random.default_rng([*seed, request.draw, 1 + request.sample]).integers(1, VOCAB, size=2 + request.sample)
    return [*common.tolist(), *own.tolist(), STOP]


def scripted_step(loop: RlLoop) -> Iterator[tuple[list[int], list[int]]]:
    """Return prompt and response of each rollout that the script writes for a `TinyTask` loop's first step."""
    for prompt in (TinyTask().prompts[i] for i in loop.step_tasks.tasks_of(1)):
        for sample in range(4):
            request = Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=SAMPLING, sample=sample)
            yield prompt.tokens.tolist(), script(request)


class Uneven(ScriptedEngine):
    """Scripted engine whose two log-probabilities differ, as under top-p."""

    def step(self) -> list[Rollout]:
        return [
            replace(
                rollout,
                policy_logprobs=-2.0 - (rollout.tokens % 5) / 2,
                logprobs=-2.0 - (rollout.tokens % 3) / 2,
            )
            for rollout in super().step()
        ]


def uneven(drafter: Drafter | None, version: int) -> ScriptedEngine:
    """Make a scripted engine, which ignores the drafter."""
    return Uneven(script, max_batch=3, version=version)


def options(**changes: object) -> RlOptions:
    """Return options of two prompts per step, in groups of four."""
    plain = {"prompts_per_step": 2, "group_size": 4, "sampling": SAMPLING}
    return RlOptions(**(plain | changes))  # type: ignore[arg-type]


def scripted_loop(
    model: PreTrainedModel | None = None,
    task: Task | None = None,
    optim: OptimOptions = PLAIN,
    drafting: Drafting | None = None,
    make_engine: EngineFactory = uneven,
    teacher: nn.Module | None = None,
    reference: MakeReference | None = None,
    **changes: object,
) -> RlLoop:
    return RlLoop(
        build() if model is None else model,
        TinyTask() if task is None else task,
        make_engine,
        optim=optim,
        options=options(**changes),
        drafting=drafting,
        teacher=teacher,
        reference=reference,
    )


def sampling_loop(
    model: PreTrainedModel | None = None,
    drafting: Drafting | None = None,
    reference: MakeReference | None = None,
    task: Task | None = None,
    **changes: object,
) -> RlLoop:
    """Return a loop with a TorchEngine, over a `TinyTask` unless another task is given."""
    model = build() if model is None else model

    def make_engine(drafter: Drafter | None, version: int) -> TorchEngine:
        # No clock decides how much is drafted, because runs are compared bit by bit.
        return TorchEngine(model, drafter, max_batch=4, max_tokens=200, version=version, num_threads=1, costs="none")

    return scripted_loop(model, task, PLAIN, drafting, make_engine, reference=reference, **changes)


def eager() -> Drafting:
    """Return a history with a very low acceptance threshold for drafts."""
    return Drafting(DraftOptions(min_acceptance=0.01))


def store(folder: Path, **changes: object) -> CheckpointStore:
    """Return a checkpoint store of the run `IDENTITY`, with hints."""
    chosen = {"folder": folder / "checkpoints", "identity": IDENTITY, "hints": folder / "history"}
    return CheckpointStore(**(chosen | changes))  # type: ignore[arg-type]


def steps_in(
    folder: Path, loop: Resumable[RlStepReport], num_steps: int, *, save_every: int | None = 1, **more: Any
) -> Iterator[RlStepReport]:
    """Yield the steps of a run in a folder, resuming an existing run and logging rollouts."""
    checkpoints = store(folder)
    opened = open_run(folder, loop, checkpoints)
    log = RolloutLog(folder / "rollouts", resume_step=opened.resume_step)
    with Metrics([JsonlSink(folder / METRICS_FILE, resume_step=opened.resume_step)]) as metrics:
        yield from run_steps(
            loop,
            num_steps=num_steps,
            save_every=save_every,
            checkpoints=checkpoints,
            metrics=metrics,
            on_step=lambda report: log.write(report.epoch, loop.latest),  # type: ignore[attr-defined]
            **more,
        )


def memory_of(drafting: Drafting) -> dict[str, torch.Tensor]:
    """Return the arrays of the history and the state of the drafter."""
    texts = {
        f"{prompt_id}.{version}": torch.from_numpy(np.array(text))
        for prompt_id, index in sorted(drafting.store.snapshot.items())
        for version, text in sorted(index.texts().items())
    }
    return {**texts, **drafting.state()}
