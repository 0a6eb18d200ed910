"""The supervised warm-up of `treering train`, a resumable run of its own inside the run's folder."""

from collections.abc import Sequence

from rich.console import Console
from transformers import PreTrainedModel

from treering.cli.run_folder import WARMUP_FOLDER
from treering.cli.session import Session
from treering.cli.train.settings import warmup_identity, warmup_options
from treering.cli.train.task import draw_sums
from treering.config import RlConfig
from treering.config.metrics import RlMetricsConfig
from treering.config.rl import RlRunConfig
from treering.ranks.group import RankGroup
from treering.train.loop.batches import TrainingTask
from treering.train.loop.checkpoint import CheckpointStore
from treering.train.loop.run import CHECKPOINTS_FOLDER
from treering.train.loop.sft import SftLoop


def warm_up(config: RlConfig, model: PreTrainedModel, group: RankGroup, console: Console) -> None:
    """Trains the model on solved prompts outside the task, sharded if several ranks do; resumes a stopped warm-up."""
    if config.warmup.num_steps == 0:
        return
    run = RlRunConfig(dir=config.run.dir / WARMUP_FOLDER, save_every=config.run.save_every, keep=1)
    optim, options = warmup_options(config)
    solved = draw_sums(config.task).held_out(config.warmup.num_prompts).solutions()
    session = Session(
        config=config.model_copy(update={"run": run, "metrics": RlMetricsConfig()}),
        loop=SftLoop(model, joined(solved, config.warmup.prompts_per_step), optim=optim, options=options, group=group),
        checkpoints=CheckpointStore(
            folder=run.dir / CHECKPOINTS_FOLDER, identity=warmup_identity(config, model), keep=run.keep, group=group
        ),
        num_steps=config.warmup.num_steps,
        console=console,
        unit="warm-up",
    )
    opened = session.open()
    with session.metrics(opened) as metrics:
        session.show(session.steps(metrics), first_step=opened.step)


def joined(tasks: Sequence[TrainingTask], size: int) -> list[TrainingTask]:
    """Joins each `size` tasks into one, the last one smaller, so that sequences share prefixes across prompts.

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
