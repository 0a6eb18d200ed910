"""The [model], [lora] and [teacher] sections of every subcommand that trains. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, ModelPath, Positive, Revision
from treering.errors import ConfigError


def _full_name(dtype: object) -> object:
    if dtype in ("fp16", "float16", "half"):
        raise ValueError(
            f"dtype must be bfloat16 or float32, got {dtype!r}; half precision needs loss scaling, which is not "
            "supported"
        )
    return {"bf16": "bfloat16", "fp32": "float32"}.get(str(dtype), dtype)


class ModelConfig(Config):
    """A pre-trained model from a folder or the hub, or a small random Qwen3 of the given shape."""

    path: ModelPath | None = Field(
        default=None,
        description="Hugging Face model: a folder, or a hub id such as Qwen/Qwen3-0.6B; none: a random model of this "
        "shape, with as many token ids as the data or its tokenizer.",
    )
    revision: Revision = None
    hidden_size: Count = Field(
        default=128,
        description="Width of the residual stream: a multiple of 32, or of 4 below 64. Heads are 32 wide, at least "
        "two; pairs of them share keys and values, if their number is even. The gated MLP is 3 times as wide.",
    )
    num_layers: Count = Field(default=4, description="Number of decoder layers.")
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(_full_name)] = Field(
        default="float32", description="Dtype of the model's computation; fp32 and bf16 are accepted too."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device for training; auto: cuda if available."
    )
    vision: Literal["trained", "frozen"] = Field(
        default="trained",
        description="For models that take images: whether the vision tower and its projection to the text are trained.",
    )

    @property
    def autocast(self) -> Literal["none", "bfloat16"]:
        """Dtype of forward passes; weights are float32."""
        return "bfloat16" if self.dtype == "bfloat16" else "none"

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        shape = sorted(self.model_fields_set - {"path", "revision", "dtype", "device", "vision"})
        if self.path is not None and shape:
            raise ConfigError(
                f"a pre-trained model has its own shape, and path = {self.path!r} conflicts with "
                f"{', '.join(shape)}; remove these, or remove path for a random model"
            )
        if self.path is None and self.revision is not None:
            raise ConfigError(
                f"revision = {self.revision!r} needs a hub id, and path is not set; set path, or remove revision"
            )
        if self.hidden_size % (4 if self.hidden_size < 64 else 32):
            raise ConfigError(
                "hidden_size must be a multiple of 32, or of 4 below 64, so that heads have an even width for RoPE, "
                f"got {self.hidden_size}; set hidden_size to 128, for example"
            )
        return self


class LoraOptions(Config):
    """Low-rank adapters on the frozen weights of a pre-trained model; only the adapters are trained and saved."""

    rank: Count | None = Field(default=None, description="Rank of the adapters; none: train all weights.")
    alpha: Count | None = Field(
        default=None, description="Numerator of the adapters' scale alpha / rank; none: twice the rank."
    )
    target_modules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="Linear modules that get adapters, such as q_proj; none: all except the output head."
    )

    @property
    def is_set(self) -> bool:
        """Whether adapters are trained."""
        return self.rank is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = sorted(self.model_fields_set - {"rank"})
        if given and not self.is_set:
            raise ConfigError(f"adapters need lora.rank, got only {', '.join(given)}; set lora.rank to 16, for example")
        return self


class DistillOptions(Config):
    """A teacher with the student's tokenizer, and the divergence from it."""

    path: ModelPath | None = Field(
        default=None, description='Hugging Face model folder or hub id; needed for rl.objective = "distill".'
    )
    revision: Revision = None
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="forward_kl",
        description="forward_kl: KL(teacher, student). reverse_kl: KL(student, teacher). jsd: "
        "Jensen-Shannon divergence, halfway between both.",
    )
    top_k: Count | None = Field(
        default=None,
        description="Number of the teacher's likeliest tokens to compare, all others as one; none: the whole "
        "vocabulary.",
    )
    weight: Positive | None = Field(
        default=None,
        description="Factor of the divergence, which is added to the loss; none: the divergence is the whole loss, in "
        '[rl] with objective = "distill".',
    )

    @property
    def is_set(self) -> bool:
        """Whether the file has any of these settings."""
        return bool(self.model_fields_set)
