"""The [lora] section of every subcommand that trains: adapters instead of all weights. Imports no torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from treering.config.model import ModelConfig
from treering.config.record import Config
from treering.config.values import Count
from treering.errors import ConfigError


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


def check_lora(lora: LoraOptions, model: ModelConfig) -> None:
    """Refuse adapters of random weights, which no checkpoint would hold.

    Raises:
        ConfigError: `lora.rank` without `model.path`.
    """
    if lora.is_set and model.path is None:
        raise ConfigError(
            f"adapters need a pre-trained model, got lora.rank = {lora.rank} without model.path; set model.path, or "
            "remove [lora]"
        )
