"""Runs `treering train`: builds task, model and loop from a configuration, and trains."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from treering.cli.display.log_console import note_doing
from treering.cli.display.progress import note_compiling
from treering.cli.run_folder import printed_warnings
from treering.cli.run_notes import RunLength, budget_note, run_length
from treering.cli.session import Session, agreed, agreed_compute, checkpoint_store, owning
from treering.cli.train.held_out import held_out_notes, load_held_out, load_trained, measure_rewards
from treering.cli.train.logs import Loop, step_logs
from treering.cli.train.loop import make_loop, make_model
from treering.cli.train.settings import identity
from treering.cli.train.summary import TrainSummary, summary_of
from treering.cli.train.task import TaskSource
from treering.cli.train.warmup import warm_up
from treering.config import RlConfig
from treering.errors import StateError
from treering.history.draft.kernel import propose
from treering.ranks.group import RankGroup
from treering.rl.loop import RlLoop
from treering.rl.step_report import RlStepReport
from treering.runtime.pipeline import PipelineLoop
from treering.train.loop.held_out import Evaluation
from treering.train.loop.run import Opened
from treering.tree.build import fill_forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRun:
    """An open run, new or resumed.

    Attributes:
        session: does its steps.
        source: its task.
        loop: new, or in the state of the newest checkpoint.
        opened: whether and where the run resumes.
        steps: each item trains, logs and saves one step and is its report.
        evaluation: on held-out prompts; None without any.
    """

    session: Session[RlStepReport]
    source: TaskSource
    loop: Loop
    opened: Opened
    steps: Iterator[RlStepReport]
    evaluation: Evaluation | None

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.session.num_steps


def train(config: RlConfig, *, config_dir: Path, console: Console) -> TrainSummary:
    """Trains as a configuration in the folder `config_dir` says, or resumes the run that its run folder holds."""
    with open_training(config, config_dir=config_dir, console=console) as run:
        first_step = run.opened.step
        reports = run.session.show(run.steps, first_step=first_step, evaluation=run.evaluation, notes_of=_notes_of)
    summary = summary_of(config, run.source, run.loop, run.opened, reports)
    total = summary.total
    if total.num_unscored and not total.num_rollouts:
        raise StateError(
            f"a run learns from rewards, and {run.source.task.reward_name} returned None for {total.num_unscored} "
            f"rollouts and scored none; return a number for some"
        )
    return summary


@contextmanager
def open_training(config: RlConfig, *, config_dir: Path, console: Console) -> Iterator[OpenRun]:
    """Opens a run: lock, model, warm-up, newest checkpoint, logs; closes the logs at the end.

    Of several ranks the first one alone has the lock and the logs.
    """
    with owning(config.run.dir) as group, ExitStack() as stack:
        yield _opened(agreed(config, config_dir, group), config_dir, console, group, stack)


def _opened(config: RlConfig, config_dir: Path, console: Console, group: RankGroup, stack: ExitStack) -> OpenRun:
    note_doing(console, "reading the task")
    source, held = load_trained(config, config_dir), load_held_out(config, config_dir)
    if held is not None:
        source = replace(source, notes=(*source.notes, *held_out_notes(held, source)))
        stack.callback(held.close)
    stack.callback(source.close)
    source.try_reward()
    note_doing(console, "loading the model")
    model = make_model(config, config_dir, source)
    note_doing(console, "preparing the first step")
    note_compiling(console, fill_forest, propose)
    length = run_length(config, len(source.task.prompts))
    compute = agreed_compute(config, config.rl, model, group, length.total, config.rl.num_train_threads)
    # The identity is that of weights before they are sharded.
    checkpoints = checkpoint_store(config, model, identity(config, source, model), source.tokenizer, group)
    loop = make_loop(config, config_dir, source, model, compute=compute, num_steps=length.total, group=group)
    if isinstance(loop, PipelineLoop):
        stack.enter_context(loop)
    session = Session(config=config, loop=loop, checkpoints=checkpoints, num_steps=length.total, console=console)
    opened = session.open()
    if group.rank == 0:
        _announce(session, config, source, model, opened, length)
    if opened.step == 0:
        warm_up(config, model, group, console)
    metrics, on_step = stack.enter_context(session.metrics(opened)), None
    if group.rank == 0:
        with printed_warnings(console):
            on_step = step_logs(config, source, loop, opened, metrics, stack)
    # Measured in this process, whatever other processes the loop has.
    policy = loop.policy if isinstance(loop, RlLoop) else lambda: loop.model
    evaluation = session.evaluation(None if held is None else measure_rewards(config, held, policy, group))
    steps = session.steps(metrics, evaluation, on_step)
    return OpenRun(session=session, source=source, loop=loop, opened=opened, steps=steps, evaluation=evaluation)


def _notes_of(report: RlStepReport) -> Sequence[str]:
    rollouts = report.rollouts
    # Rewards that raised, and episodes that failed.
    left_out = [
        f"warning: step {report.step}: {rollouts.num_reward_errors} rollouts left out; {' '.join(message.split())}"
        for message in rollouts.reward_errors[:1]
    ]
    return [*(() if report.update is None else report.update.notes), *left_out]


def _announce(
    session: Session[RlStepReport],
    config: RlConfig,
    source: TaskSource,
    model: PreTrainedModel,
    opened: Opened,
    length: RunLength,
) -> None:
    longest = source.longest_prompt + config.sampling.max_tokens
    session.say(*source.notes, budget_note("rl.max_batch_tokens", config.rl.max_batch_tokens, longest))
    steps = f"{length.total} steps of {config.rl.prompts_per_step} x {config.rl.group_size} rollouts"
    what = f"{len(source.task.prompts)} prompts ({source.kind}); {{}}; {steps}"
    num_ranks = max(session.checkpoints.group.size, config.runtime.trainer_ranks)
    session.announce(opened, length, model, what, num_ranks)
