"""The configuration of `treering sft`: model, trajectories, training and output.

Loading it opens no file that a setting names, and imports no torch.
"""

from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from treering.config.eval import SftEvalConfig
from treering.config.record import Config
from treering.config.sections import TrainingConfig
from treering.config.steps import NormalizerOrNumber, StepsOptions
from treering.config.values import Count, CountOrAuto, FilePaths, TemplateDate, TokenizerPath
from treering.data.formats.reader import FailedRuns, FormatName
from treering.errors import ConfigError

Overlong: TypeAlias = Literal["error", "drop", "cut"]
"""Treatment of sequences that are longer than a limit."""


class DataConfig(Config):
    """Trajectories to train on."""

    source: Literal["files", "real", "generated"] = Field(
        default="files",
        description="files: `files` and `tokenizer` are looked up next to the configuration, in the current folder, "
        "then in the real-data folder (TREERING_DATA, default ../shared/data). real: in the real-data folder only; "
        "without it, 32 tasks are generated instead. generated: these tasks.",
    )
    files: FilePaths = Field(
        default=(),
        description="Trajectory files: JSON Lines, JSON or Parquet, plain, gzip or zstandard; folders of them, each "
        "one dataset; or patterns of such names, which stand for the matching files.",
    )
    failed: FailedRuns = Field(default="left_out", description='Records marked as failed runs: "left_out" or "kept".')
    format: FormatName = Field(
        default="auto", description="Format of the records; auto: found from the keys of each file's first record."
    )
    tokenizer: TokenizerPath = None
    template: Literal["auto", "plain", "hf"] = Field(
        default="auto",
        description="How messages become text. hf: by the tokenizer's chat template. plain: by the plain form. auto: "
        "hf if the tokenizer has a template, else plain if it knows the markers.",
    )
    date: TemplateDate = None
    max_tasks: Count | None = Field(
        default=None, description="Tasks to keep from the start of each file, or to generate; none: all."
    )
    min_reward: float | None = Field(
        default=None,
        description="Least reward of a trained trajectory; others and those without a reward are dropped and counted; "
        "none: train all.",
    )
    max_length: Count | None = Field(default=None, description="Most tokens of a sequence; none: no limit.")
    overlong: Overlong = Field(
        default="error",
        description="Treatment of longer sequences. error: stop and name the first one. drop: drop them. cut: keep "
        "their first max_length tokens, as TRL does, so a cut turn trains no end.",
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_length is None and self.overlong != "error":
            raise ConfigError(
                f'overlong = "{self.overlong}" needs max_length, which is not set; set max_length, or remove overlong'
            )
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.source == "generated" and self.files:
            raise ConfigError(
                f'source = "generated" reads no files, got {len(self.files)} in files; remove files, or set source = '
                '"files"'
            )
        if self.source != "generated" and not self.files:
            raise ConfigError(
                f'source = "{self.source}" needs at least one file, and files is empty; name some in files = [...], '
                'or set source = "generated"'
            )
        return self


class SftOptions(StepsOptions):
    """Steps: tasks per step, and the loss."""

    normalizer: NormalizerOrNumber = Field(
        default="token_mean", description=StepsOptions.model_fields["normalizer"].description
    )
    trees_per_step: CountOrAuto = Field(
        default="auto",
        description="Tasks per optimizer step, each one tree. auto: 8, or fewer if an epoch would have less than 16 "
        "steps.",
    )


class SftConfig(TrainingConfig):
    """Everything that `treering sft CONFIG` reads.

    Example: `[data]` with `source = "generated"` and `[train]` with `num_steps = 20` is a complete file; it trains a
    random Qwen3 of 4 layers on 32 generated trees.
    """

    steps_name: ClassVar[str] = "train"
    step_size_name: ClassVar[str] = "trees_per_step"

    eval: SftEvalConfig = Field(default_factory=SftEvalConfig, description="Held-out trajectories.")
    data: DataConfig = Field(description="The trajectories.")
    train: SftOptions = Field(description="Steps and the loss.")

    @property
    def options(self) -> SftOptions:
        """[train] with the settings of other sections that its steps need."""
        return self.train.changed(**self.options_elsewhere)

    @model_validator(mode="after")
    def _check_generated(self) -> Self:
        if self.data.source != "generated":
            return self
        if self.model.path is not None:
            raise ConfigError(
                'data.source = "generated" draws meaningless token ids, got the pre-trained model model.path = '
                f"{self.model.path!r}; name real files, or remove model.path"
            )
        if self.eval.files:
            raise ConfigError(
                'held-out files have the token ids of a tokenizer, and data.source = "generated" has others; '
                "set eval.share instead"
            )
        if self.teacher.is_set:
            raise ConfigError(
                'a teacher needs the token ids of its tokenizer, and data.source = "generated" has others; name files'
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.data.template == "hf" and self.data.tokenizer is None and self.model.path is None:
            raise ConfigError(
                'data.template = "hf" needs the chat template of a tokenizer, and neither data.tokenizer nor '
                'model.path is set; set data.tokenizer to a Hugging Face tokenizer folder, or data.template = "plain"'
            )
        return self
