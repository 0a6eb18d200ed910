"""The configuration of `treering sft`: which model, which trajectories, how to train, where to write.

This file knows the settings, their units and which of them contradict each other; it refuses to open any file that a
setting names, to build anything, and to import torch.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.errors import ConfigError

# TOML has strings and arrays only; every other type stays strict.
FilePath = Annotated[Path, Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class ModelConfig(Config):
    """A pre-trained model from a folder, or a small random one of the given shape."""

    path: FilePath | None = Field(
        default=None, description="Hugging Face model folder; none: a random model of this shape."
    )
    family: Literal["qwen3"] = Field(default="qwen3", description="Architecture of the random model.")
    vocab_size: Count | None = Field(default=None, description="Number of token ids; none: as many as the data needs.")
    hidden_size: Count = Field(default=128, description="Width of the residual stream.")
    num_layers: Count = Field(default=4, description="Number of decoder layers.")
    num_heads: Count = Field(default=4, description="Number of query heads.")
    num_kv_heads: Count = Field(default=2, description="Number of key and value heads; divides num_heads.")
    head_size: Annotated[int, Field(ge=2, multiple_of=2)] = Field(
        default=32, description="Width of a head; even, for RoPE."
    )
    intermediate_size: Count = Field(default=384, description="Width of the gated MLP.")
    tie_embeddings: bool = Field(default=True, description="Whether the output head is the embedding matrix.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type that the model computes in.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to train; auto: cuda if there is one."
    )

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        shape = sorted(self.model_fields_set - {"path", "dtype", "device"})
        if self.path is not None and shape:
            raise ConfigError(
                f"a model from a folder has its own shape, and path = {str(self.path)!r} stands beside "
                f"{', '.join(shape)}; remove these, or remove path for a random model"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads divides num_heads, and {self.num_kv_heads} does not divide {self.num_heads}; set "
                f"num_kv_heads to 1 or to {self.num_heads}, for example"
            )
        return self


class StandInConfig(Config):
    """Agent-like trajectories that are generated where no real data is used."""

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
        description="files: `files` and `tokenizer` are looked up beside the configuration, in the current folder, "
        "then in the real-data folder (TREERING_DATA, default ../shared/data). real: they are inside the real-data "
        "folder, and without that folder the stand-in is generated. generated: the stand-in.",
    )
    files: Annotated[tuple[FilePath, ...], Field(strict=False)] = Field(
        default=(), description="JSONL trajectory files, plain or .gz."
    )
    tokenizer: FilePath | None = Field(
        default=None, description="Hugging Face tokenizer folder; needed for `messages`."
    )
    template: Literal["plain", "hf"] = Field(
        default="plain", description="How messages become text: the plain form, or the tokenizer's chat template."
    )
    max_tasks: Count | None = Field(default=None, description="Tasks to keep from the start of each file; none: all.")
    vocab: Literal["full", "folded"] = Field(
        default="full",
        description="full: the tokenizer's ids. folded: the ids that occur are renumbered by falling frequency; where "
        "model.vocab_size is smaller, rare ids share its last eighth.",
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
        if self.template == "hf" and self.tokenizer is None:
            raise ConfigError(
                'template = "hf" uses the chat template of a tokenizer, and tokenizer is not set; set tokenizer to a '
                'Hugging Face tokenizer folder, or template = "plain"'
            )
        return self


class TrainConfig(Config):
    """The optimisation: AdamW with linear warm-up, then a constant or falling rate, and gradient clipping."""

    num_epochs: Count | None = Field(default=None, description="Passes over the tasks; none: until num_steps.")
    num_steps: Count | None = Field(
        default=None, description="Optimizer steps; none: until num_epochs. The earlier one ends."
    )
    trees_per_step: Count = Field(default=8, description="Tasks, each one tree, per optimizer step.")
    max_tokens: Count = Field(
        default=16384, description="Unique tokens per micro-batch, at most; the largest tree must fit."
    )
    learning_rate: Positive = Field(default=1e-4, description="AdamW's rate after warm-up, per step.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps in which the rate rises linearly from 0."
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="The rate after warm-up; cosine falls to min_learning_rate at the last step."
    )
    min_learning_rate: NonNegative = Field(default=0.0, description="Where the cosine ends, per step.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decay of matrices, times the rate; vectors never decay."
    )
    max_grad_norm: NonNegative = Field(default=1.0, description="Clip the gradient's global L2 norm; 0: never clip.")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: Positive = Field(default=1e-8, description="Added to the root of AdamW's second moment.")
    normalizer: Literal["token_mean", "sequence_mean", "tree_mean", "constant", "sum"] = Field(
        default="token_mean", description="What the summed loss of a step is divided by."
    )
    divisor: Positive | None = Field(default=None, description='The constant of normalizer = "constant", in tokens.')
    shared: Literal["sum", "once"] = Field(
        default="sum", description="sum: a shared token counts once per branch, as flat training does. once: one time."
    )
    layout: Literal["tree", "packed"] = Field(
        default="tree",
        description="tree: each shared token is computed once. packed: every sequence by itself (off-switch).",
    )
    gradient_checkpointing: Literal["none", "reentrant", "non_reentrant"] = Field(
        default="none", description="Recompute activations in the backward pass, and by which of torch's two ways."
    )
    seed: Seed = Field(default=0, description="Seed of the random model's weights and of the order of the tasks.")

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.num_epochs is None and self.num_steps is None:
            raise ConfigError("training needs an end, and neither num_epochs nor num_steps is set; set one, or both")
        if self.num_steps is not None and self.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"warm-up ends before training does, and warmup_steps = {self.warmup_steps} is not below num_steps = "
                f"{self.num_steps}; lower warmup_steps"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "constant" and "min_learning_rate" in self.model_fields_set:
            raise ConfigError(
                f'min_learning_rate is where a cosine ends, and schedule = "constant" with min_learning_rate = '
                f'{self.min_learning_rate}; set schedule = "cosine", or remove min_learning_rate'
            )
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"a cosine falls, and min_learning_rate = {self.min_learning_rate} is above learning_rate = "
                f"{self.learning_rate}; lower min_learning_rate"
            )
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if (self.normalizer == "constant") != (self.divisor is not None):
            raise ConfigError(
                f'divisor belongs to normalizer = "constant", and here normalizer = "{self.normalizer}" with divisor = '
                f"{self.divisor}; set both, or neither"
            )
        if self.layout == "packed" and self.shared == "once":
            raise ConfigError(
                'layout = "packed" trains every sequence by itself, so a shared token counts in each, and shared = '
                '"once" cannot hold; set shared = "sum", or layout = "tree"'
            )
        if self.layout == "packed" and self.normalizer == "tree_mean":
            raise ConfigError(
                'layout = "packed" has no trees, and normalizer = "tree_mean" averages over them; set another '
                'normalizer, or layout = "tree"'
            )
        return self


class RunConfig(Config):
    """Where a run writes, and how often."""

    dir: FilePath = Field(
        default=Path("runs/sft"), description="Run folder: checkpoints, metrics.jsonl, TensorBoard files."
    )
    save_every: Count | None = Field(default=None, description="Steps between checkpoints; none: one at the end.")
    keep: Count = Field(default=2, description="Checkpoints to keep, the newest ones.")
    log: Annotated[tuple[Literal["jsonl", "tensorboard"], ...], Field(strict=False)] = Field(
        default=("jsonl",), description="Where metrics go, each sink at most once."
    )

    @model_validator(mode="after")
    def _check_log(self) -> Self:
        if len(set(self.log)) < len(self.log):
            raise ConfigError(f"a sink is named once, and log = {list(self.log)} repeats one; remove the repetition")
        return self


class SftConfig(Config):
    """Everything that `treering sft CONFIG` reads.

    Example: `[data]` with `source = "generated"` and `[train]` with `num_steps = 20` is a complete file; it trains a
    random Qwen3 of 4 layers on 32 generated trees.
    """

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    data: DataConfig = Field(description="The trajectories.")
    train: TrainConfig = Field(description="The optimisation.")
    run: RunConfig = Field(default_factory=RunConfig, description="The output.")

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.model.path is not None and self.data.vocab == "folded":
            raise ConfigError(
                'data.vocab = "folded" renumbers token ids, which a pre-trained model (model.path = '
                f'{str(self.model.path)!r}) does not know; set data.vocab = "full", or remove model.path'
            )
        if self.model.path is not None and self.data.source == "generated":
            raise ConfigError(
                'data.source = "generated" draws meaningless token ids, and model.path = '
                f"{str(self.model.path)!r} is a pre-trained model; name real files, or remove model.path"
            )
        return self
