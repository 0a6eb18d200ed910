"""Sentences on a run that does little, is complete already, or takes far longer than it needs to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treering.config import RlConfig, SftConfig
from treering.config.steps import StepsConfig
from treering.train.loop.batches import StepPlan

_FEW_STEPS = 10
_MANY_PARTITIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """How long a run is, and by which settings.

    Attributes:
        section: of the settings, as "train".
        per_step: the setting of tasks per step, as "trees_per_step".
        plan: the tasks of each step.
        num_steps: as set; None for no limit.
        num_epochs: as set; None for no limit. The earlier one ends the run.
        schedule: of the learning rate.
    """

    section: str
    per_step: str
    plan: StepPlan
    num_steps: int | None
    num_epochs: int | None
    schedule: Literal["constant", "cosine"]

    @property
    def total(self) -> int:
        """Steps of the whole run.

        Example: 5 tasks, 2 per step and 2 epochs are 6 steps.
        """
        limits = [self.num_steps, None if self.num_epochs is None else self.num_epochs * self.plan.steps_per_epoch]
        return min(limit for limit in limits if limit is not None)

    def short_note(self) -> str | None:
        """Why the run has few steps, and what gives more; None where it has enough, or as many as were asked for."""
        if self.total >= _FEW_STEPS or self.total == self.num_steps:
            return None
        plan = self.plan
        lower = f", or lower {self.section}.{self.per_step}" if plan.trees_per_step > 1 and plan.num_tasks > 1 else ""
        return (
            f"this run is short, {_counted(self.total, 'step')}: an epoch is {_counted(plan.num_tasks, 'task')}, "
            f"{plan.trees_per_step} a step; raise {self._ending}{lower}"
        )

    def resume_note(self, run_dir: Path, step: int) -> str:
        """That the run in a folder goes on after a step, or that it is complete and how it can go on.

        Example: "the run in runs/sft is complete after step 60; raise train.num_epochs (now 2) to go on".
        """
        if step < self.total:
            return f"resuming the run in {run_dir} after step {step}"
        begin = f"the run in {run_dir} is complete after step {step}"
        if self.schedule == "constant":
            return f"{begin}; raise {self._ending} to go on"
        return f'{begin}; its learning rate has ended (schedule = "{self.schedule}"), so go on in another run.dir'

    @property
    def in_words(self) -> str:
        """Example: "1 step of 1 task"."""
        size = min(self.plan.trees_per_step, self.plan.num_tasks)
        return f"{_counted(self.total, 'step')} of {_counted(size, 'task')}"

    @property
    def _ending(self) -> str:
        """The setting that ends the run."""
        name, value = ("num_steps", self.num_steps) if self.total == self.num_steps else ("num_epochs", self.num_epochs)
        return f"{self.section}.{name} (now {value})"


def run_length(config: SftConfig | RlConfig, num_tasks: int) -> RunLength:
    """How long a run is; of `sft` once its step size is known."""
    steps: StepsConfig
    if isinstance(config, SftConfig):
        section, per_step, steps, schedule = "train", "trees_per_step", config.train, config.train.schedule
        size = int(config.train.trees_per_step)
    else:
        section, per_step, steps, schedule = "rl", "prompts_per_step", config.rl, config.optim.schedule
        size = config.rl.prompts_per_step
    plan = StepPlan(num_tasks=num_tasks, trees_per_step=size, seed=steps.seed)
    return RunLength(
        section=section,
        per_step=per_step,
        plan=plan,
        num_steps=steps.num_steps,
        num_epochs=steps.num_epochs,
        schedule=schedule,
    )


def budget_note(setting: str, max_tokens: int | Literal["auto"], longest: int) -> str | None:
    """A warning where a budget of tokens cuts the longest sequence into very many parts; None elsewhere.

    Example: a budget of 1 and a sequence of 4,000 tokens give 4,000 passes for that sequence alone.
    """
    if max_tokens == "auto" or max_tokens * _MANY_PARTITIONS >= longest:
        return None
    num_parts = -(-longest // max_tokens)
    return (
        f"warning: {setting} = {max_tokens} cuts the longest sequence, {longest:,} tokens, into {num_parts:,} parts, "
        f'each a pass of its own, so that steps take very long; {longest:,} hold it whole, and "auto" finds what fits'
    )


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}{'s' * (count != 1)}"
