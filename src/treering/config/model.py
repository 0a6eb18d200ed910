"""The [model] section of every subcommand that trains. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, ModelPath, Revision
from treering.errors import ConfigError


def _full_name(dtype: object) -> object:
    """Return the name of a dtype without abbreviation."""
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
        default=128, description="Width of the residual stream, and of all heads; a multiple of 2 num_heads."
    )
    num_layers: Count = Field(default=4, description="Number of decoder layers.")
    num_heads: Count = Field(
        default=4, description="Number of query heads; pairs of them share keys and values, if it is even."
    )
    intermediate_size: Count = Field(default=384, description="Width of the gated MLP.")
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
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size must be a multiple of 2 num_heads = {2 * self.num_heads}, so that heads have an even "
                f"width for RoPE, got {self.hidden_size}; set hidden_size to {32 * self.num_heads}, for example"
            )
        return self
