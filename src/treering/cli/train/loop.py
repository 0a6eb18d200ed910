"""Builds the loop of `treering train`: in this process, or in child processes that read the same configuration."""

import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.hub import find_model
from treering.cli.models import build_model, load_teacher
from treering.cli.run_folder import WARMUP_FOLDER
from treering.cli.settings import optim_options
from treering.cli.train.held_out import load_trained
from treering.cli.train.settings import check_room, cluster_of, engine_factory, make_drafting, rl_options
from treering.cli.train.task import TaskSource, episode_options
from treering.config import RlConfig
from treering.config.runtime import RuntimeConfig
from treering.engine.protocol import Engine
from treering.history.draft.drafter import Drafter
from treering.ranks.group import RankGroup
from treering.rl.loop import EngineFactory, RlLoop
from treering.rl.tasks.task import Task
from treering.runtime.ipc.launcher import Launcher, Resources
from treering.runtime.ipc.local_launcher import LocalLauncher
from treering.runtime.pipeline import PipelineLoop
from treering.schedule.policies import make_policy
from treering.schedule.predict.lengths import make_predictor
from treering.train.loop.checkpoint import checkpoint_path
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.ranks import shard_model
from treering.train.loop.restore import load_weights, random_state, set_random_state
from treering.train.loop.run import CHECKPOINTS_FOLDER


class TrainRecipe:
    """The `Recipe` of a configuration; pickling drops the built objects."""

    def __init__(self, config: RlConfig, config_dir: Path) -> None:
        """`config_dir` is the folder of the configuration file."""
        self._config = config
        # Other processes may run in another folder.
        self._config_dir = config_dir.absolute()
        self._shell_dir = Path.cwd()
        self._make_engine: EngineFactory | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_config", "_config_dir", "_shell_dir")} | {"_make_engine": None}

    @property
    def max_batch(self) -> int:
        """See `Recipe`."""
        max_rows = self._config.engine.max_batch
        if not self._config.task.runs_episodes:
            return max_rows
        return episode_options(self._config.task, max_rows).limit

    def make_model(self) -> PreTrainedModel:
        """See `Recipe`."""
        transformers_logging.disable_progress_bar()
        return make_model(self._config, self._config_dir, self._source)

    def make_task(self) -> Task:
        """See `Recipe`."""
        return self._source.task

    def make_engine(self, model: PreTrainedModel, drafter: Drafter | None, version: int) -> Engine:
        """See `Recipe`."""
        if self._make_engine is None:
            # One for all engines of a process, which may share what takes long to start.
            self._make_engine = engine_factory(self._config, model, self._source)
        return self._make_engine(drafter, version)

    @cached_property
    def _source(self) -> TaskSource:
        return load_trained(self._config, self._config_dir, self._shell_dir)


def make_model(config: RlConfig, config_dir: Path, source: TaskSource) -> PreTrainedModel:
    """The configured model, with a vocabulary for the task's ids."""
    return build_model(
        config.model,
        num_ids=source.task.vocab_size,
        seed=config.rl.seed,
        folder=find_model(config.model, config_dir),
        lora=config.lora,
        takes_pictures=source.has_pictures,
    )


def make_loop(
    config: RlConfig,
    config_dir: Path,
    source: TaskSource,
    model: PreTrainedModel,
    *,
    compute: ComputeOptions,
    num_steps: int,
    group: RankGroup | None = None,
) -> RlLoop | PipelineLoop:
    """The loop over a given task and model, which several ranks (`group`) shard; each samples by a whole copy.

    Raises:
        InputError: a prompt that the engine has no room for.
    """
    check_room(config, source)
    whole = None
    if group is not None and group.size > 1:
        whole = copy.deepcopy(model).eval().requires_grad_(False)
        shard_model(model)
    # Other processes may run in another folder.
    folders = config_dir.absolute(), config.run.dir.absolute()
    reference = partial(make_reference, config, *folders, source.task.vocab_size, takes_pictures=source.has_pictures)
    optim, options = optim_options(config.optim, num_steps), rl_options(config, source, compute)
    if config.runtime.workers == 0:
        make_engine = engine_factory(config, model if whole is None else whole, source)
        return RlLoop(
            model,
            source.task,
            make_engine,
            optim=optim,
            options=options,
            drafting=make_drafting(config),
            teacher=_load_teacher(config, config_dir),
            group=group,
            rollout_model=whole,
            reference=reference,
        )
    launcher = make_launcher(config.runtime)
    return PipelineLoop(
        model,
        source.task,
        TrainRecipe(config, config_dir),
        optim=optim,
        options=options,
        num_steps=num_steps,
        cluster=cluster_of(config),
        policy=make_policy(config.schedule),
        predictor=make_predictor(max_tokens=config.sampling.max_tokens),
        drafting=make_drafting(config, shares_host=launcher.shares_host),
        num_trainer_ranks=config.runtime.trainer_ranks,
        reward_time_limit_s=config.runtime.reward_time_limit_s,
        worker_time_limit_s=config.runtime.worker_time_limit_s,
        launcher=launcher,
        reference=reference,
    )


def make_reference(
    config: RlConfig, config_dir: Path, run_dir: Path, num_ids: int, *, takes_pictures: bool = False
) -> PreTrainedModel:
    """The weights that a run begins with, those of its warm-up where it has one, also once it was resumed.

    Leaves torch's random state as it is.

    Raises:
        StateError: the checkpoint of the warm-up is gone.
    """
    before = random_state()
    model = build_model(
        config.model,
        num_ids=num_ids,
        seed=config.rl.seed,
        folder=find_model(config.model, config_dir),
        takes_pictures=takes_pictures,
    )
    set_random_state(before)
    num_steps = config.warmup.num_steps
    if num_steps > 0:
        load_weights(model, checkpoint_path(run_dir / WARMUP_FOLDER / CHECKPOINTS_FOLDER, num_steps))
    return model


def make_launcher(runtime: RuntimeConfig) -> Launcher:
    """What starts the workers; raises MissingExtraError where Ray is to do it and is missing."""
    if runtime.launcher == "local":
        return LocalLauncher()
    from treering.integrations.ray import RayLauncher

    needs = runtime.resources.model_dump()
    return RayLauncher(
        num_rollout_workers=runtime.workers,
        num_trainer_ranks=runtime.trainer_ranks,
        resources={role: Resources(**needs[role]) for role in ("rollout_worker", "reward_worker", "trainer")},
        listen=runtime.listen,
    )


def _load_teacher(config: RlConfig, config_dir: Path) -> PreTrainedModel | None:
    folder = find_model(config.teacher, config_dir, setting="teacher.path")
    if folder is None:
        return None
    return load_teacher(folder, config.model, tokenizer=find_model(config.model, config_dir))
