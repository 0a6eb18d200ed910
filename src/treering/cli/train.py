"""Run `treering train` from its settings to its summary: task, model, warm-up, loop, steps."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display import note_compiling
from treering.cli.hub import find_model
from treering.cli.models import build_model, find_teacher, tokenizer_note
from treering.cli.run_folder import WARMUP_FOLDER, warnings_on_console
from treering.cli.session import (
    RunLength,
    TrainingRun,
    checkpoint_store,
    join_run,
)
from treering.cli.train_engine import (
    check_room,
    cluster_of,
    engine_factory,
    held_out_notes,
    identity,
    load_held_out,
    load_trained,
    make_drafting,
    measure_rewards,
    warmup_identity,
    warmup_options,
)
from treering.cli.train_report import RlRun, step_logs, summary_of, totals
from treering.cli.train_task import TaskSource, draw_sums
from treering.config import RlConfig
from treering.config.rl import RlRunConfig
from treering.config.run import RlMetricsConfig
from treering.engine.protocol import Engine
from treering.errors import StateError, plural
from treering.files.writing import CHECKPOINTS_FOLDER
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import propose
from treering.ranks.group import RankGroup
from treering.rl.loop import EngineFactory, RlLoop
from treering.rl.step_report import RlStepReport
from treering.rl.tasks.task import Task
from treering.runtime.controller import PipelineSpec
from treering.runtime.pipeline import PipelineLoop
from treering.runtime.process import Actors
from treering.runtime.ray_actors import RayActors
from treering.schedule.histopipe import make_policy
from treering.schedule.predict import make_predictor
from treering.train.loop.batches import TrainingTask
from treering.train.loop.checkpoint import (
    CheckpointStore,
    checkpoint_path,
    load_weights,
    random_state,
    set_random_state,
)
from treering.train.loop.compute import shard_model
from treering.train.loop.sft_loop import SftLoop
from treering.tree.radix import fill_forest


class TrainRecipe:
    """`Recipe` of a configuration; pickling drops the built objects."""

    def __init__(self, config: RlConfig, config_dir: Path) -> None:
        """Keep the configuration and the folder of its file, `config_dir`."""
        self._config = config
        # Other processes may run in another folder.
        self._config_dir = config_dir.absolute()
        self._shell_dir = Path.cwd()
        self._make_engine: EngineFactory | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_config", "_config_dir", "_shell_dir")} | {"_make_engine": None}

    @property
    def max_batch(self) -> int:
        """Rollouts that an engine runs at a time, or episodes in flight."""
        task = self._config.task_options
        return task.num_in_flight if task.runs_episodes else task.max_rows

    def make_model(self) -> PreTrainedModel:
        """Build the configured model."""
        transformers_logging.disable_progress_bar()
        return make_model(self._config, self._config_dir, self._source)

    def make_task(self) -> Task:
        """Load the configured task."""
        return self._source.task

    def make_engine(self, model: PreTrainedModel, drafter: Drafter | None, version: int) -> Engine:
        """Build an engine for a model."""
        if self._make_engine is None:
            # All engines of a process share one factory, because parts of it take long to start.
            self._make_engine = engine_factory(self._config, model, self._source)
        return self._make_engine(drafter, version)

    @cached_property
    def _source(self) -> TaskSource:
        return load_trained(self._config, self._config_dir, self._shell_dir)


def make_model(config: RlConfig, config_dir: Path, source: TaskSource) -> PreTrainedModel:
    """Return the configured model, with a vocabulary that covers the task's ids."""
    return build_model(
        config.model,
        num_ids=source.task.vocab_size,
        seed=config.rl.seed,
        folder=find_model(config.model, config_dir),
        lora=config.lora,
        takes_images=source.has_images,
    )


def make_loop(
    config: RlConfig,
    config_dir: Path,
    source: TaskSource,
    model: PreTrainedModel,
    *,
    num_steps: int,
    rank_group: RankGroup | None = None,
) -> RlLoop | PipelineLoop:
    """Return the loop over a task and model; ranks shard the model, and each samples from a whole copy.

    Raises:
        InputError: a prompt does not fit the engine.
    """
    check_room(config, source)
    whole = None
    if rank_group is not None and rank_group.size > 1:
        whole = copy.deepcopy(model).eval().requires_grad_(False)
        shard_model(model, config.model.autocast)
    # Other processes may run in another folder.
    folders = config_dir.absolute(), config.run.dir.absolute()
    reference = partial(make_reference, config, *folders, source.task.vocab_size, takes_images=source.has_images)
    optim, options = config.optim.changed(num_steps=num_steps), config.options
    if config.runtime.workers == 0:
        policy = find_model(config.model, config_dir)
        make_engine = engine_factory(config, model if whole is None else whole, source)
        return RlLoop(
            model,
            source.task,
            make_engine,
            optim=optim,
            options=options,
            drafting=make_drafting(config),
            teacher=find_teacher(config.teacher, config.model, config_dir, tokenizer=policy),
            rank_group=rank_group,
            rollout_model=whole,
            reference=reference,
        )
    actors = make_actors(config)
    spec = PipelineSpec(
        recipe=TrainRecipe(config, config_dir),
        optim=optim,
        options=options,
        num_steps=num_steps,
        cluster=cluster_of(config),
        policy=make_policy(config.schedule),
        predictor=make_predictor(max_tokens=config.sampling.max_tokens),
        actors=actors,
        drafting=make_drafting(config),
        num_trainer_ranks=config.runtime.trainer_ranks,
        reward_time_limit_s=config.runtime.reward_time_limit_s,
        worker_time_limit_s=config.runtime.worker_time_limit_s,
        reference=reference,
    )
    return PipelineLoop(model, source.task, spec)


def make_reference(
    config: RlConfig, config_dir: Path, run_dir: Path, num_ids: int, *, takes_images: bool = False
) -> PreTrainedModel:
    """Return the weights that a run began with, after its warm-up if it has one, also in a resumed run.

    Torch's random state is left unchanged.

    Raises:
        StateError: the checkpoint of the warm-up is missing.
    """
    before = random_state()
    model = build_model(
        config.model,
        num_ids=num_ids,
        seed=config.rl.seed,
        folder=find_model(config.model, config_dir),
        takes_images=takes_images,
    )
    set_random_state(before)
    num_steps = config.warmup.num_steps
    if num_steps > 0:
        load_weights(model, checkpoint_path(run_dir / WARMUP_FOLDER / CHECKPOINTS_FOLDER, num_steps))
    return model


def make_actors(config: RlConfig) -> Actors:
    """Return the launcher of the workers.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    return RayActors(
        num_rollout_workers=config.runtime.workers,
        num_trainer_ranks=config.runtime.trainer_ranks,
        worker_cpus=config.engine.num_threads or 1,
    )


def warm_up(config: RlConfig, model: PreTrainedModel, rank_group: RankGroup, console: Console) -> None:
    """Train the model on solved prompts outside the task, sharded over several ranks; resume a stopped warm-up."""
    if config.warmup.num_steps == 0:
        return
    section = RlRunConfig(dir=config.run.dir / WARMUP_FOLDER, save_every=config.run.save_every, keep=1)
    optim, options = warmup_options(config)
    sums = draw_sums(config.task)
    solved = sums.held_out(max(1, min(4096, sums.num_others))).solutions()
    run = TrainingRun(
        config=config.model_copy(update={"run": section, "metrics": RlMetricsConfig()}),
        loop=SftLoop(model, joined(solved, 64), optim=optim, options=options, rank_group=rank_group),
        checkpoints=CheckpointStore(
            folder=section.dir / CHECKPOINTS_FOLDER,
            identity=warmup_identity(config, model),
            keep=section.keep,
            rank_group=rank_group,
        ),
        num_steps=config.warmup.num_steps,
        console=console,
        unit="warm-up",
    )
    run.open()
    with run.metrics() as metrics:
        run.prepare(metrics)
        run.run_to_end()


def joined(tasks: Sequence[TrainingTask], size: int) -> list[TrainingTask]:
    """Join every `size` tasks into one, so that sequences share prefixes across prompts; the last may be smaller.

    Example: five tasks of one sequence each, joined by two, are three tasks of 2, 2 and 1 sequences.
    """
    parts = [tasks[first : first + size] for first in range(0, len(tasks), size)]
    return [
        TrainingTask(
            task_id=number,
            sequences=tuple(sequence for task in part for sequence in task.sequences),
            loss_masks=tuple(mask for task in part for mask in task.loss_masks),
        )
        for number, part in enumerate(parts)
    ]


_EARLY = 10
"""Number of steps without a difference in rewards after which a run gets a warning."""


def train(config: RlConfig, *, config_dir: Path, console: Console) -> tuple[dict[str, Any], Table]:
    """Start or resume the run of a configuration, whose file is in the folder `config_dir`; return its summary."""
    with open_training(config, config_dir=config_dir, console=console) as run:
        reports = run.run_to_end(partial(step_notes, num_steps=run.num_steps))
    total = totals(reports)
    if total.num_unscored and not total.num_rollouts:
        raise StateError(
            f"{run.source.task.reward_name} returned None for all {total.num_unscored} rollouts, so the run learned "
            "nothing; return a number for some"
        )
    return summary_of(run, total, reports)


@contextmanager
def open_training(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[RlRun]:
    """Open a run: lock, task, model, newest checkpoint, warm-up, logs; close the logs at the end.

    Only the first of several ranks holds the lock and writes the logs.
    """
    with join_run(config, config_dir) as (config, rank_group), ExitStack() as stack:
        console.print("reading the task")
        source, held = load_trained(config, config_dir), load_held_out(config, config_dir)
        if held is not None:
            source = replace(source, notes=(*source.notes, *held_out_notes(held, source)))
            stack.callback(held.close)
        stack.callback(source.close)
        source.try_reward(config.runtime.reward_time_limit_s)
        console.print("loading the model")
        model = make_model(config, config_dir, source)
        doubt = tokenizer_note(model, find_model(config.model, config_dir), source.tokenizer)
        console.print("preparing the first step")
        note_compiling(console, fill_forest, propose)
        length = RunLength(config=config, num_tasks=len(source.task.prompts))
        # The identity needs the weights before they are sharded.
        checkpoints = checkpoint_store(config, model, identity(config, source, model), source, rank_group)
        loop = make_loop(config, config_dir, source, model, num_steps=length.total, rank_group=rank_group)
        if isinstance(loop, PipelineLoop):
            stack.enter_context(loop)
        run = RlRun(
            config=config, source=source, loop=loop, checkpoints=checkpoints, num_steps=length.total, console=console
        )
        run.open()
        steps = f"{plural(length.total, 'step')} of {config.rl.prompts_per_step} x {config.rl.group_size} rollouts"
        what = f"{plural(len(source.task.prompts), 'prompt')} ({config.task.kind}); {{}}; {steps}"
        longest = source.longest_prompt + config.sampling.max_tokens
        run.announce(length, model, what, notes=[doubt, *source.notes], longest=longest)
        if run.opened.step == 0:
            warm_up(config, model, rank_group, console)
        metrics, on_step = stack.enter_context(run.metrics()), None
        if rank_group.rank == 0:
            with warnings_on_console(console):
                on_step = step_logs(run, metrics)
        # Evaluation runs in this process, even if the loop has workers.
        policy = loop.policy if isinstance(loop, RlLoop) else lambda: loop.model
        run.prepare(metrics, None if held is None else measure_rewards(config, held, policy, rank_group), on_step)
        yield run


def step_notes(reports: Sequence[RlStepReport], num_steps: int) -> list[str]:
    """Return notes on the last of a call's steps: dropped rollouts, and a warning if no group has two rewards so far.

    Example: after ten steps in which every reward is 0 there is one warning, and another after the last of `num_steps`.
    """
    report = reports[-1]
    notes = [] if report.update is None else list(report.update.notes)
    # Rewards that raised, and episodes that failed.
    for message in report.rollouts.reward_errors[:1]:
        dropped = plural(report.rollouts.num_reward_errors, "rollout")
        notes.append(f"warning: step {report.step}: {dropped} dropped; {' '.join(message.split())}")
    counts = [each.rollouts for each in reports]
    # A resumed run that counts only its last few steps gets no warning.
    if len(reports) in (_EARLY, num_steps) and all(
        each.num_groups == each.num_zero_variance + each.num_empty_groups for each in counts
    ):
        notes.append(
            f"warning: no group of {plural(len(reports), 'step')} had two different rewards, so no rollout had an "
            "advantage; change the reward or the prompts, or raise rl.group_size or sampling.temperature"
        )
    return notes
