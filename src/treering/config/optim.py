"""The [optim] section of `sft` and `train`: AdamW, its learning-rate schedule and clipping. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, Fraction, NonNegative, Positive
from treering.errors import ConfigError


class OptimOptions(Config):
    """AdamW with linear warm-up, then a constant or falling learning rate, and gradient clipping."""

    learning_rate: Positive = Field(default=1e-4, description="AdamW's learning rate after warm-up.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps in which the learning rate rises linearly from 0."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate after warm-up; linear and cosine fall to min_learning_rate at the last step.",
    )
    min_learning_rate: NonNegative = Field(default=0.0, description="Last learning rate of linear and cosine.")
    weight_decay: NonNegative = Field(
        default=0.0, description="Decay of matrices, multiplied by the learning rate; vectors never decay."
    )
    max_grad_norm: NonNegative = Field(default=1.0, description="Clip the gradient's global L2 norm; 0: never clip.")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: Positive = Field(default=1e-8, exclude=True, description="Added to the root of AdamW's second moment.")
    num_steps: Count | None = Field(
        default=None,
        exclude=True,
        description="Steps of the whole run, needed for falling learning rates; none: unknown.",
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "constant" and "min_learning_rate" in self.model_fields_set:
            raise ConfigError(
                f"min_learning_rate = {self.min_learning_rate} needs a falling learning rate, got schedule = "
                '"constant"; set schedule = "linear" or "cosine", or remove min_learning_rate'
            )
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"min_learning_rate must be at most learning_rate = {self.learning_rate}, got "
                f"{self.min_learning_rate}; lower min_learning_rate"
            )
        check_warmup(warmup_steps=self.warmup_steps, num_steps=None if self.schedule == "constant" else self.num_steps)
        return self


def check_warmup(*, warmup_steps: int, num_steps: int | None) -> None:
    """Refuse a warm-up that is not shorter than the training; `num_steps` None is unknown."""
    if num_steps is not None and warmup_steps >= num_steps:
        raise ConfigError(f"warmup_steps must be below num_steps = {num_steps}, got {warmup_steps}; lower warmup_steps")
