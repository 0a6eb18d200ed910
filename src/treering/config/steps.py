"""What the sections [train] of `sft` and [rl] of `train` have in common: length, loss, layers and memory of a step."""

from typing import Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.router import RouterLosses
from treering.config.teacher import DistillOptions
from treering.config.values import Count, CountOrAuto, Positive, Seed
from treering.errors import ConfigError
from treering.types import Layout as Layout

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "tree_mean", "constant", "sum"]
Autocast = Literal["none", "bfloat16"]


class ComputeOptions(Config):
    """How steps are computed: memory, speed and precision.

    Example: `ComputeOptions(max_batch_tokens=16_384)` keeps the activations of at most 16,384 tokens at once.
    """

    max_batch_tokens: CountOrAuto = Field(
        default="auto",
        description="Unique tokens per micro-batch, at most; a larger tree runs in partitions. auto: on CUDA what free "
        "memory holds, halved where it does not; elsewhere 16384.",
    )
    gradient_checkpointing: Literal["none", "reentrant", "non_reentrant"] = Field(
        default="none", description="Recompute activations in the backward pass, and by which of torch's two ways."
    )
    layers: Literal["auto", "stock", "compiled", "liger"] = Field(
        default="auto",
        description="How the model's layers run. stock: as transformers runs them. compiled: by torch.compile. liger: "
        "by the kernels of treering[liger], on CUDA. auto: on CUDA liger where it is installed and exact, else "
        "compiled for runs of 200 steps or more on one rank; stock elsewhere.",
    )
    ranks: Literal["gathered", "sharded"] = Field(
        default="gathered",
        description="Under torchrun. gathered: weights stay gathered during a step, and gradients are reduced once. "
        "sharded: they are gathered in every pass, and all ranks run the same passes, so no tree may be cut.",
    )
    autocast: Autocast = Field(
        default="none",
        exclude=True,
        description="bfloat16: computes in it where torch's autocast does; weights keep their dtype.",
    )
    backend: str = Field(default="auto", exclude=True, description="Of the attention.")


class StepsOptions(ComputeOptions):
    """Steps: how many, of which loss, and how they are computed."""

    num_epochs: Count | None = Field(default=None, description="Passes over the data; none: until num_steps.")
    num_steps: Count | None = Field(default=None, description="Steps; none: until num_epochs. The earlier one ends.")
    normalizer: Normalizer | None = Field(
        default=None, description="What the summed loss of a step is divided by; unset in [rl]: the objective's own."
    )
    divisor: Positive | None = Field(default=None, description='The constant of normalizer = "constant", in tokens.')
    layout: Layout = Field(
        default="tree",
        description="tree: each token that a task's sequences share is computed once. joined: also those that tasks of "
        "a step share, such as a system prompt; on one rank. packed: every sequence by itself (off-switch).",
    )
    seed: Seed = Field(default=0, description="Seed of the random model's weights and of the order of the data.")
    distill: DistillOptions | None = Field(
        default=None, exclude=True, description="How the student is compared with the teacher of the loop; none: not."
    )
    router_losses: RouterLosses | None = Field(
        default=None, exclude=True, description="Losses on routers of experts; none: neither trained nor measured."
    )

    @property
    def _divides_by_default(self) -> bool:
        """Whether a divisor alone makes the normalizer constant."""
        return False

    @model_validator(mode="after")
    def _check_normalizer(self) -> Self:
        is_constant = self.normalizer == "constant" or (self.divisor is not None and self._divides_by_default)
        if is_constant != (self.divisor is not None):
            raise ConfigError(
                f'divisor belongs to normalizer = "constant", and here normalizer = "{self.normalizer}" with divisor = '
                f"{self.divisor}; set both, or neither"
            )
        if self.layout != "tree" and self.normalizer == "tree_mean":
            raise ConfigError(
                f'layout = "{self.layout}" has no tree per task, and normalizer = "tree_mean" averages over them; set '
                'another normalizer, or layout = "tree"'
            )
        return self


def check_length(section: str, steps: StepsOptions) -> None:
    """Refuse a run without an end.

    Raises:
        ConfigError: neither a number of steps nor of epochs.
    """
    if steps.num_epochs is None and steps.num_steps is None:
        raise ConfigError(
            f"training needs an end, and neither {section}.num_epochs nor {section}.num_steps is set; set one, or both"
        )
