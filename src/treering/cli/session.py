"""What `sft` and `train` do around their loop: ranks, folder, checkpoints, logs, evaluations, signals, the display."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

from rich.console import Console
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.begun import ConfigT, as_begun
from treering.cli.display.run_display import RunDisplay, SavingNote
from treering.cli.push.card import model_card
from treering.cli.ranks import is_first, joined
from treering.cli.run_folder import COSTS_FILE, HISTORY_FOLDER, locked, open_sinks, printed_warnings, write_settings
from treering.cli.run_notes import RunLength
from treering.cli.settings import compute_options
from treering.cli.signals import deferred_to
from treering.cli.starts import log_start
from treering.config import RlConfig, SftConfig
from treering.config.steps import StepsConfig
from treering.metrics import Metrics
from treering.model.context import tree_attention
from treering.ranks.group import RankGroup, all_ranks
from treering.train.fit_costs import cached_costs
from treering.train.loop.checkpoint import CheckpointStore, Identity
from treering.train.loop.compute import ComputeOptions, num_threads, precision, prepare_model
from treering.train.loop.held_out import Evaluation, Measure
from treering.train.loop.interruption import Interruption
from treering.train.loop.resumable import ReportT, Resumable
from treering.train.loop.run import CHECKPOINTS_FOLDER, Opened, knows_first, open_run, run_steps


@contextmanager
def owning(folder: Path) -> Iterator[RankGroup]:
    """Joins the ranks that torchrun started, of which the first one alone holds the folder of the run."""
    # Bars of a library would flicker through ours.
    transformers_logging.disable_progress_bar()
    with joined(), locked(folder) if is_first() else nullcontext():
        yield all_ranks()


def agreed(config: ConfigT, config_dir: Path, group: RankGroup) -> ConfigT:
    """The configuration as the run began with it, see `as_begun`, alike on all ranks."""
    if group.rank == 0:
        config = as_begun(config, config_dir)
    return group.gather(config)[0]  # type: ignore[no-any-return]


def agreed_compute(
    config: SftConfig | RlConfig,
    section: StepsConfig,
    model: nn.Module,
    group: RankGroup,
    num_steps: int,
    threads: int | None = None,
) -> ComputeOptions:
    """How steps are computed, with the costs that one rank has measured, so that all share trees alike.

    Where `sharing` is "measured", costs are fitted once per run, to stock layers and with so many threads, and kept in
    its folder.

    Raises:
        StateError: the file of costs is damaged.
    """
    compute = compute_options(config.model, section, num_steps)
    if group.rank == 0 and section.sharing == "measured":
        prepare_model(model, replace(compute, layers="stock"))
        with num_threads(threads), precision(model, compute.autocast):
            compute = replace(compute, costs=cached_costs(model, config.run.dir / COSTS_FILE))
    return group.gather(compute)[0]  # type: ignore[no-any-return]


def checkpoint_store(
    config: SftConfig | RlConfig, model: nn.Module, identity: Identity, tokenizer: Path | None, group: RankGroup
) -> CheckpointStore:
    """The checkpoints of a run, with the tokenizer, a model card and, of `train`, the history as hints."""
    folder = config.run.dir
    takes_pictures = getattr(getattr(model, "config", None), "vision_config", None) is not None
    return CheckpointStore(
        folder=folder / CHECKPOINTS_FOLDER,
        identity=identity,
        keep=config.run.keep,
        card=partial(model_card, folder, has_tokenizer=tokenizer is not None, takes_pictures=takes_pictures),
        tokenizer=tokenizer,
        hints=folder / HISTORY_FOLDER if isinstance(config, RlConfig) else None,
        group=group,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session(Generic[ReportT]):
    """A call that trains: it opens the folder of a run, does its steps and shows them.

    Attributes:
        config: its settings.
        loop: new, or in the state of the newest checkpoint once the run is open.
        checkpoints: where it is saved.
        num_steps: of the whole run.
        console: writes to stderr.
        unit: what steps are called.
        interruption: ends the steps at a signal; made here.
    """

    config: SftConfig | RlConfig
    loop: Resumable[ReportT]
    checkpoints: CheckpointStore
    num_steps: int
    console: Console
    unit: str = "step"
    interruption: Interruption = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "interruption", Interruption(self.checkpoints.group))

    def open(self) -> Opened:
        """Opens a new run, or loads the newest checkpoint; what is damaged is said."""
        with printed_warnings(self.console):
            return open_run(self.config.run.dir, self.loop, self.checkpoints)

    def say(self, *lines: str | None) -> None:
        """Prints lines for the user, those that there are."""
        for line in lines:
            if line is not None:
                self.console.print(line, soft_wrap=True)

    def announce(self, opened: Opened, length: RunLength, model: PreTrainedModel, what: str, num_ranks: int) -> None:
        """Notes the start in the folder of the run, and says what is trained, where, and how far it is.

        Args:
            opened: the run.
            length: how long it is.
            model: that is trained.
            what: "{}" in it stands for the model.
            num_ranks: processes that train.
        """
        folder = self.config.run.dir
        write_settings(self.config, self.config.run, self.num_steps)
        log_start(folder, opened, model, num_ranks)
        device, dtype = next(model.parameters()).device, self.config.model.dtype
        self.say(
            length.short_note() if opened.is_new else None,
            f"{what.format(f'{parameters_in_words(model)} on {device} in {dtype}')} into {folder}",
            attention_in_words(model, dtype),
            None if opened.is_new else length.resume_note(folder, opened.step),
        )

    def metrics(self, opened: Opened) -> Metrics:
        """The sinks of the run; none on ranks after the first."""
        if self.checkpoints.group.rank > 0:
            return Metrics([])
        settings = self.config.model_dump(mode="json")
        with printed_warnings(self.console):
            return Metrics(open_sinks(self.config.metrics, self.config.run.dir, opened, settings))

    def evaluation(self, measure: Measure | None) -> Evaluation | None:
        """When held-out data are measured; None without any."""
        if measure is None:
            return None
        known = self.checkpoints.group.gather(knows_first(self.config.run.dir))[0]
        return Evaluation(measure=measure, every=self.config.eval.every, knows_first=known)

    def steps(
        self,
        metrics: Metrics,
        evaluation: Evaluation | None = None,
        on_step: Callable[[ReportT], Mapping[str, float] | None] | None = None,
    ) -> Iterator[ReportT]:
        """Each item trains, logs and saves one step and is its report."""
        return run_steps(
            self.loop,
            num_steps=self.num_steps,
            save_every=self.config.run.save_interval,
            checkpoints=self.checkpoints,
            metrics=metrics,
            on_step=on_step,
            evaluation=evaluation,
            interruption=self.interruption,
            on_saved=SavingNote(self.console),
        )

    def show(
        self,
        steps: Iterator[ReportT],
        *,
        first_step: int,
        evaluation: Evaluation | None = None,
        notes_of: Callable[[ReportT], Sequence[str]] = lambda report: (),
    ) -> list[ReportT]:
        """Does the steps, shows each with what is to say of it, and saves before a signal ends them."""
        title, reports = str(self.config.run.dir), list[ReportT]()
        with (
            RunDisplay(
                title=title, num_steps=self.num_steps, first_step=first_step, console=self.console, unit=self.unit
            ) as display,
            deferred_to(self.interruption, self.console.print),
        ):
            self.loop.on_progress = self.interruption.checked(display.show_phase)
            if evaluation is not None:
                evaluation.on_measured = display.show_evaluation
            for report in steps:
                self.say(*notes_of(report))
                display.show({"step": report.step, **report.values()})
                reports.append(report)
        return reports


def parameters_in_words(model: PreTrainedModel) -> str:
    """How many parameters a model has.

    Example: "917,504 parameters", and with adapters "917,504 parameters, 24,576 of them trained".
    """
    words = f"{model.num_parameters():,} parameters"
    num_trained = model.num_parameters(only_trainable=True)
    return words if num_trained == model.num_parameters() else f"{words}, {num_trained:,} of them trained"


def attention_in_words(model: nn.Module, dtype: Any) -> str:
    """The attention backend of a run and the reason for it.

    Example: "attention: segments (auto: the fastest that is exact on CPU, as measured)".
    """
    with precision(model, "bfloat16" if dtype == "bfloat16" else "none"), tree_attention(model) as attention:
        return f"attention: {attention.backend} ({attention.reason})"
