"""Common settings of [train] of `sft` and [rl] of `train`: length, loss, layers and memory of a step; [router]."""

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from treering.config.model import DistillOptions
from treering.config.record import Config
from treering.config.values import Count, CountOrAuto, NonNegative, Positive, Seed
from treering.errors import ConfigError
from treering.types import Layout as Layout

_Named = Literal["token_mean", "sequence_mean", "sequence_sum", "tree_mean", "sum"]
Normalizer = Literal[_Named, "constant"]


def _name_or_number(value: object) -> object:
    """Return a valid value, with one error instead of one for each side of a union."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if is_number or value in get_args(_Named):
        return value
    raise ValueError(
        f"one of {', '.join(get_args(_Named))}, or a number above 0, got {value!r}; a number is a constant divisor"
    )


NormalizerOrNumber = Annotated[_Named | Positive, BeforeValidator(_name_or_number)]
Autocast = Literal["none", "bfloat16"]


class ComputeOptions(Config):
    """How steps are computed: memory, speed and precision.

    Example: `ComputeOptions(max_batch_tokens=16_384)` keeps the activations of at most 16,384 tokens at once.
    """

    max_batch_tokens: CountOrAuto = Field(
        default="auto",
        description="Most unique tokens per micro-batch; a larger tree runs in partitions. auto: on CUDA as many as "
        "free memory holds, halved if that was too many; elsewhere 16384.",
    )
    gradient_checkpointing: Literal["none", "reentrant", "non_reentrant"] = Field(
        default="none", description="Recompute activations in the backward pass, by one of torch's two methods."
    )
    layers: Literal["auto", "stock", "compiled", "liger"] = Field(
        default="auto",
        description="How the model's layers run. stock: as transformers runs them. compiled: by torch.compile. liger: "
        "by the kernels of treering[liger], on CUDA. auto: on CUDA liger if it is installed and exact, else compiled "
        "for runs of 200 steps or more on one rank; stock elsewhere.",
    )
    ranks: Literal["gathered", "sharded"] = Field(
        default="gathered",
        description="Under torchrun. gathered: weights stay gathered during a step, and gradients are reduced once. "
        "sharded: weights are gathered in every pass, and all ranks run the same passes, so no tree may be cut.",
    )
    autocast: Autocast = Field(
        default="none",
        exclude=True,
        description="bfloat16: use torch's autocast; weights keep their dtype.",
    )
    backend: str = Field(default="auto", exclude=True, description="Attention backend.")


class RouterLosses(Config):
    """Losses on routers, over all tokens of all branches; for mixtures of experts only."""

    balance: NonNegative | None = Field(
        default=None,
        description="Factor of the load-balancing loss, as Hugging Face's router_aux_loss_coef; 0: only measure it.",
    )
    z: NonNegative | None = Field(
        default=None, description="Factor of the mean squared log-sum-exp of router logits; 0: only measure it."
    )

    @property
    def is_set(self) -> bool:
        """Whether any router loss is trained or measured."""
        return self.balance is not None or self.z is not None


class StepsOptions(ComputeOptions):
    """Steps: their number, their loss, and how they are computed."""

    num_epochs: Count | None = Field(default=None, description="Passes over the data; none: until num_steps.")
    num_steps: Count | None = Field(
        default=None, description="Steps; none: until num_epochs. The run ends at the earlier of both."
    )
    normalizer: NormalizerOrNumber | None = Field(
        default=None,
        description="Divisor of a step's summed loss, by name or as a constant number of tokens; unset in [rl]: the "
        "objective's default.",
    )
    layout: Layout = Field(
        default="tree",
        description="tree: compute each token that a task's sequences share once. joined: also tokens that tasks of "
        "a step share, such as a system prompt; on one rank. packed: every sequence separately (off-switch).",
    )
    seed: Seed = Field(
        default=0, description="Seed of the random model's weights, of the data's order and of the noise of sampling."
    )
    distill: DistillOptions | None = Field(
        default=None,
        exclude=True,
        description="Divergence of the student from the loop's teacher; none: no distillation.",
    )
    router_losses: RouterLosses | None = Field(
        default=None, exclude=True, description="Losses on routers of experts; none: neither trained nor measured."
    )

    @property
    def weighting(self) -> dict[str, Any]:
        """Arguments of an objective that divide as `normalizer` says; none where it is unset."""
        if self.normalizer is None or isinstance(self.normalizer, str):
            return {} if self.normalizer is None else {"normalizer": self.normalizer}
        return {"normalizer": "constant", "divisor": float(self.normalizer)}

    @model_validator(mode="after")
    def _check_normalizer(self) -> Self:
        if self.layout != "tree" and self.normalizer == "tree_mean":
            raise ConfigError(
                f'normalizer = "tree_mean" needs one tree per task, got layout = "{self.layout}"; set another '
                'normalizer, or layout = "tree"'
            )
        return self
