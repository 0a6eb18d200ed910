"""The synchronous RL loop: sample, reward, train, update the engine's weights."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.data import Trajectory
from treering.engine.protocol import Engine, EngineStats
from treering.history.draft.drafter import Drafter
from treering.ranks.group import RankGroup
from treering.ranks.sharded_state import copy_weights
from treering.rl.collect import Collected, added
from treering.rl.drafting import Drafting
from treering.rl.sampler import FailedSteps, Sampler, check_contexts, check_prompts
from treering.rl.step_report import Phases, RlStepReport, as_trajectories, rollout_report, total_stats
from treering.rl.tasks.task import Task
from treering.rl.trainer import Trainer
from treering.train.loop.batches import StepTasks
from treering.train.loop.checkpoint import Resumable
from treering.train.loop.other_models import MakeReference
from treering.types import PromptId

EngineFactory: TypeAlias = Callable[[Drafter | None, int], Engine]
"""Makes an engine from a drafter (None: no speculation) and the policy version of the model's weights."""


class RlLoop(Resumable[RlStepReport]):
    """Train a model on the rewards of its own rollouts.

    The engine is made at the first step, after a resumed run has loaded the model's weights.

    Example:
        >>> from treering.engine.protocol import Sampling
        >>> options = RlOptions(prompts_per_step=8, group_size=8, sampling=Sampling(max_tokens=64))
        >>> def make_engine(drafter, version):
        ...     return TorchEngine(model, drafter, version=version)                                 # doctest: +SKIP
        >>> optim = OptimOptions(learning_rate=1e-5)
        >>> loop = RlLoop(model, task, make_engine, optim=optim, options=options)                   # doctest: +SKIP
        >>> [loop.step().rollouts.reward_mean for _ in range(3)]                                    # doctest: +SKIP
        [0.48, 0.5, 0.53]
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        make_engine: EngineFactory,
        *,
        optim: OptimOptions,
        options: RlOptions,
        drafting: Drafting | None = None,
        teacher: nn.Module | None = None,
        rank_group: RankGroup | None = None,
        rollout_model: nn.Module | None = None,
        reference: MakeReference | None = None,
    ) -> None:
        """Put the model in training mode, with gradient checkpointing if the options ask for it.

        Args:
            model: the trained model; the engine copies its weights after every update.
            task: prompts and rewards.
            make_engine: see `EngineFactory`.
            optim: the optimiser.
            options: options of sampling and training.
            drafting: history and drafter of earlier rollouts; None samples without drafts.
            teacher: model to distill from, with `options.distill`.
            rank_group: ranks of a prepared model, which share the prompts to sample and the trees to train.
            rollout_model: unsharded copy of a sharded model; the loop copies the weights into it for the engine.
            reference: makes the reference model of `options.kl` with the run's initial weights. The first update calls
                it, unless one rank trains adapters: then the model without adapters is the reference.

        Raises:
            InputError: no prompt, two prompts with the same id, or too few model positions for a prompt's rollouts.
            UnsupportedError: router losses are set for a model without routers.
        """
        self.model = model
        self._task = task
        self._make_engine = make_engine
        self._options = options
        self._drafting = drafting
        check_prompts(task)
        check_contexts(task, options.sampling.max_tokens, model)
        self.step_tasks = StepTasks(
            num_tasks=len(task.prompts), trees_per_step=options.prompts_per_step, seed=options.seed
        )
        self._rank_group = RankGroup() if rank_group is None else rank_group
        self._trainer = Trainer(model, optim, options, teacher, self._rank_group, reference)
        self._sampler = Sampler(task, options, drafting, self._rank_group)
        self._failed_steps = FailedSteps(task.reward_name)
        self._num_steps_done = 0
        self._num_batches = 0
        self._version = 0
        self._draws: dict[PromptId, int] = {}
        self._rollout_model = rollout_model
        self._drafters: list[Mapping[str, Any]] = []
        self._drafter_state = None if drafting is None else drafting.state()
        self._rehearsal_state = self._sampler.rehearsal.state()
        self._engine: Engine | None = None
        self._latest: list[Trajectory] = []

    @property
    def num_steps_done(self) -> int:
        """Steps since the start of the run, including those before a resume and those that trained nothing."""
        return self._num_steps_done

    @property
    def version(self) -> int:
        """Policy version of the weights: the number of updates since the start of the run."""
        return self._version

    @property
    def latest(self) -> list[Trajectory]:
        """Rollouts of the latest step as trajectories with advantages; empty before the first step."""
        return self._latest

    @property
    def engine(self) -> Engine:
        """The engine, made at first access; all ranks must access it together."""
        if self._engine is None:
            self._copy_weights(trained_only=False)
            self._engine = self._make_engine(None if self._drafting is None else self._drafting.drafter, self._version)
        return self._engine

    def policy(self) -> nn.Module:
        """Return the whole model with the current weights; all ranks must call it together."""
        self._copy_weights(trained_only=False)
        return self.model if self._rollout_model is None else self._rollout_model

    def step(self) -> RlStepReport:
        """Sample the next step's prompts, train on their rewards, and update the engine's weights.

        Weights and policy version stay if the rewards of each group are equal and the loss has neither teacher nor KL.

        Raises:
            InputError: a prompt does not fit into the engine; the weights are unchanged.
            StateError: gradients are not finite, or every reward of several steps failed; the weights are unchanged.
        """
        engine, started = self.engine, time.perf_counter()
        step, version, before = self._num_steps_done + 1, self._version, engine.stats
        first, (collected, num_batches, draws) = self._num_batches + 1, self._collect(engine)
        self._failed_steps.note(step, collected)
        sampled = time.perf_counter()
        trained = self._trainer.train(step, collected.groups, on_progress=self.on_progress)
        handed = time.perf_counter()
        self._hand_over(engine, has_moved=trained.update is not None)
        self._draws, self._num_batches = draws, num_batches
        self._num_steps_done, epoch = step, self.step_tasks.epoch_of(first)
        self._latest = as_trajectories(collected.groups, epoch=epoch, step=step, advantages=trained.group_advantages)
        self._note_drafter()
        stats = self._gather_engines(engine.stats.since(before))
        ended = time.perf_counter()
        return RlStepReport(
            step=step,
            epoch=epoch,
            version=version,
            rollouts=rollout_report(
                collected, num_zero_variance=trained.num_zero_variance, num_empty_groups=trained.num_empty_groups
            ),
            engine=stats,
            update=trained.update,
            phases=Phases(
                rollout_s=sampled - started, train_s=handed - sampled, update_s=ended - handed, step_s=ended - started
            ),
        )

    def state(self) -> dict[str, Any]:
        """Return step, version, draws, and the states of optimiser and drafters; each rank has its own drafter."""
        return {
            "num_steps_done": self._num_steps_done,
            "num_batches": self._num_batches,
            "version": self._version,
            "draws": dict(self._draws),
            "optimizer": self._trainer.state(),
            "episodes": self._sampler.forecast.state(),
            "rehearsal": self._rehearsal_state,
            # With several ranks, the states that the latest step gathered, so that saving needs no communication.
            "drafter": self._drafters or self._drafter_state,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state` of a loop over the same parameters, with a new engine.

        Raises:
            StateError: the state belongs to a model with other parameters.
        """
        self._trainer.load_state(state["optimizer"])
        self._num_steps_done = state["num_steps_done"]
        # The state of a `PipelineLoop`, which samples one batch per step, has no such number.
        self._num_batches = state.get("num_batches", self._num_steps_done)
        self._version = state["version"]
        self._draws = dict(state["draws"])
        if "episodes" in state:
            self._sampler.forecast.load_state(state["episodes"])
        if "rehearsal" in state and self._options.rehearse != "off":
            self._sampler.rehearsal.load_state(state["rehearsal"])
        drafters = state["drafter"] if isinstance(state["drafter"], list) else [state["drafter"]]
        drafter = drafters[self._rank_group.rank % len(drafters)]
        if self._drafting is not None and drafter is not None:
            self._drafting.load_state(drafter)
        self._note_drafter()
        self._drafters = []
        self._engine = None

    def save_hints(self, file: Path) -> None:
        """Write the history, if there is one."""
        if self._drafting is not None:
            self._drafting.save(file)

    def load_hints(self, file: Path) -> None:
        """Load the history; a missing or damaged file gives a warning and costs speed."""
        if self._drafting is not None:
            self._drafting.load(file)
        self._engine = None

    def _collect(self, engine: Engine) -> tuple[Collected, int, dict[PromptId, int]]:
        """Sample the groups of the next step; return them, the batches sampled so far, and the draws after the step.

        With dynamic sampling the groups end with the last one that is needed; later rollouts are dropped.
        """
        options, num_batches, draws = self._options, self._num_batches, dict(self._draws)
        parts: list[Collected] = []
        while True:
            num_batches += 1
            prompts, following = (
                [self._task.prompts[i] for i in self.step_tasks.tasks_of(number)]
                for number in (num_batches, num_batches + 1)
            )
            parts.append(
                self._sampler.collect(engine, prompts, draws, following=following, on_progress=self.on_progress)
            )
            draws |= {prompt.prompt_id: draws.get(prompt.prompt_id, 0) + 1 for prompt in prompts}
            if options.max_gen_batches == 1:
                return parts[0], num_batches, draws
            groups = [group for part in parts for group in part.groups]
            found = [i for i, group in enumerate(groups) if self._trainer.differs(group)][: options.prompts_per_step]
            if len(found) == options.prompts_per_step:
                return added(parts, tuple(groups[: found[-1] + 1])), num_batches, draws
            if len(parts) == options.max_gen_batches:
                return added(parts, tuple(groups)), num_batches, draws

    def _hand_over(self, engine: Engine, *, has_moved: bool) -> None:
        if self._drafting is not None:
            self._drafting.publish()
            engine.refresh_history()
        if has_moved:
            self._version += 1
            self._copy_weights(trained_only=True)
            engine.update_weights(self._version)
        else:
            # A resumed run has no cached keys and values, and computing them again rounds differently (law 8).
            self._engine = None

    def _note_drafter(self) -> None:
        """Keep the states of drafter and rehearsal for a checkpoint, which must not contain a part of a step."""
        self._drafter_state = None if self._drafting is None else self._drafting.state()
        self._rehearsal_state = self._sampler.rehearsal.state()

    def _gather_engines(self, stats: EngineStats) -> EngineStats:
        """Return the counts summed over ranks; keep the states of all ranks' drafters."""
        if self._rank_group.size == 1:
            return stats
        learnt = self._drafter_state or {}
        facts = self._rank_group.gather((stats, {name: values.numpy() for name, values in learnt.items()}))
        self._drafters = [{name: torch.from_numpy(own[name]) for name in own} for _, own in facts if own]
        return total_stats(stats for stats, _ in facts)

    def _copy_weights(self, *, trained_only: bool) -> None:
        if self._rollout_model is not None:
            copy_weights(self.model, self._rollout_model, trained_only=trained_only)
