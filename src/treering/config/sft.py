"""The configuration of `treering sft`: model, trajectories, training and output.

Loading it opens no file that a setting names, and imports no torch.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.eval import SftEvalConfig
from treering.config.load import Config
from treering.config.lora import LoraConfig, check_lora
from treering.config.metrics import MetricsConfig
from treering.config.model import ModelConfig
from treering.config.optim import OptimConfig, check_warmup
from treering.config.router import RouterConfig
from treering.config.run import RunConfig
from treering.config.steps import Normalizer, StepsConfig
from treering.config.teacher import TeacherConfig, check_teacher
from treering.config.values import Count, CountOrAuto, FilePath, ModelPath, Seed, TemplateDate
from treering.data.formats.detect import FormatName
from treering.data.formats.reader import FailedRuns
from treering.errors import ConfigError


class StandInConfig(Config):
    """Generated agent-like trajectories, used if there is no real data."""

    num_tasks: Count = Field(default=32, description="Number of tasks, each one tree.")
    num_trials: Count = Field(default=4, description="Trajectories per task.")
    vocab_size: Annotated[int, Field(ge=16)] = Field(
        default=512, description="Number of token ids that are drawn from."
    )
    seed: Seed = Field(default=0, description="Seed of the generator.")


class DataConfig(Config):
    """Trajectories to train on."""

    source: Literal["files", "real", "generated"] = Field(
        default="files",
        description="files: `files` and `tokenizer` are looked up next to the configuration, in the current folder, "
        "then in the real-data folder (TREERING_DATA, default ../shared/data). real: they are inside the real-data "
        "folder, and without that folder the stand-in is generated. generated: the stand-in.",
    )
    files: Annotated[tuple[FilePath, ...], Field(strict=False)] = Field(
        default=(),
        description="Trajectory files: JSON Lines, JSON or Parquet, plain, gzip or zstandard; folders of them, each "
        "one set; or patterns of such names, which mean their files.",
    )
    failed: FailedRuns = Field(
        default="left_out", description='Records that say that their run failed: "left_out" or "kept".'
    )
    format: FormatName = Field(
        default="auto", description="Format of the records; auto: found from the keys of each file's first record."
    )
    tokenizer: ModelPath | None = Field(
        default=None, description="Hugging Face tokenizer folder or hub id, for `messages`; none: that of model.path."
    )
    template: Literal["auto", "plain", "hf"] = Field(
        default="auto",
        description="How messages become text. hf: by the tokenizer's chat template. plain: by the plain form. auto: "
        "hf where the tokenizer has a template, else plain where it knows the markers.",
    )
    date: TemplateDate = None
    max_tasks: Count | None = Field(default=None, description="Tasks to keep from the start of each file; none: all.")
    cache: Literal["on", "off"] = Field(
        default="on",
        description="on: the tokens of the files are kept for the next start, see `treering cache`. off: they are not.",
    )
    stand_in: StandInConfig = Field(default_factory=StandInConfig, description="The generated data.")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.source == "generated" and self.files:
            raise ConfigError(
                f'source = "generated" reads no files, and files has {len(self.files)}; remove files, or set source = '
                '"files"'
            )
        if self.source != "generated" and not self.files:
            raise ConfigError(
                f'source = "{self.source}" needs at least one file, and files is empty; name some in files = [...], '
                'or set source = "generated"'
            )
        return self


class TrainConfig(StepsConfig, OptimConfig):
    """The optimisation: AdamW with linear warm-up, then a constant or falling rate, and gradient clipping."""

    normalizer: Normalizer = Field(default="token_mean", description="What the summed loss of a step is divided by.")
    trees_per_step: CountOrAuto = Field(
        default="auto",
        description="Tasks, each one tree, per optimizer step. auto: 8, fewer where an epoch would have less than 16 "
        "steps.",
    )
    objective: Literal["sft", "distill"] = Field(
        default="sft",
        description="sft: the negative log-probability of each trained token. distill: the divergence from [teacher].",
    )
    shared: Literal["sum", "once"] = Field(
        default="sum", description="sum: a shared token counts once per branch, as flat training does. once: one time."
    )

    @model_validator(mode="after")
    def _check_packed(self) -> Self:
        check_warmup(warmup_steps=self.warmup_steps, num_steps=self.num_steps)
        if self.layout == "packed" and self.shared == "once":
            raise ConfigError(
                'layout = "packed" trains every sequence by itself, so a shared token counts in each, and shared = '
                '"once" cannot hold; set shared = "sum", or layout = "tree"'
            )
        return self


class SftConfig(Config):
    """Everything that `treering sft CONFIG` reads.

    Example: `[data]` with `source = "generated"` and `[train]` with `num_steps = 20` is a complete file; it trains a
    random Qwen3 of 4 layers on 32 generated trees.
    """

    # First two: where a mistaken key exists in two sections, the later one is suggested.
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="The teacher of a distillation.")
    eval: SftEvalConfig = Field(default_factory=SftEvalConfig, description="Held-out trajectories.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="Adapters instead of all weights.")
    data: DataConfig = Field(description="The trajectories.")
    train: TrainConfig = Field(description="The optimisation.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="Losses on routers of experts.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where metrics go.")
    run: RunConfig = Field(default_factory=RunConfig, description="The output.")

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        check_lora(self.lora, self.model)
        return self

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.model.path is not None and self.data.source == "generated":
            raise ConfigError(
                'data.source = "generated" draws meaningless token ids, and model.path = '
                f"{self.model.path!r} is a pre-trained model; name real files, or remove model.path"
            )
        return self

    @model_validator(mode="after")
    def _check_eval(self) -> Self:
        if self.eval.files and self.data.source == "generated":
            raise ConfigError(
                'files of held-out data have the token ids of a tokenizer, and data.source = "generated" gives others; '
                "set eval.share instead"
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.data.template == "hf" and self.data.tokenizer is None and self.model.path is None:
            raise ConfigError(
                'data.template = "hf" uses the chat template of a tokenizer, and neither data.tokenizer nor model.path '
                'is set; set data.tokenizer to a Hugging Face tokenizer folder, or data.template = "plain"'
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        check_teacher(self.teacher, section="train", objective=self.train.objective)
        if self.teacher.is_set and self.data.source == "generated":
            raise ConfigError(
                'a teacher knows the token ids of its own tokenizer, and data.source = "generated" gives others; name '
                "files"
            )
        return self
