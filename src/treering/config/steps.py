"""What the sections [train] of `sft` and [rl] of `train` have in common: length, loss, layers and memory of a step."""

from typing import Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.config.values import Count, CountOrAuto, Positive, Seed
from treering.errors import ConfigError

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "tree_mean", "constant", "sum"]


class StepsConfig(Config):
    """Steps: how many, of which loss, and how they are computed."""

    num_epochs: Count | None = Field(default=None, description="Passes over the data; none: until num_steps.")
    num_steps: Count | None = Field(default=None, description="Steps; none: until num_epochs. The earlier one ends.")
    normalizer: Normalizer | None = Field(
        default=None, description="What the summed loss of a step is divided by; none: the objective's own."
    )
    divisor: Positive | None = Field(default=None, description='The constant of normalizer = "constant", in tokens.')
    layout: Literal["tree", "packed"] = Field(
        default="tree",
        description="tree: each shared token is computed once. packed: every sequence by itself (off-switch).",
    )
    max_batch_tokens: CountOrAuto = Field(
        default="auto",
        description="Unique tokens per micro-batch, at most; a larger tree runs in partitions. auto: on CUDA what free "
        "memory holds, halved where it does not; elsewhere, and on several ranks, 16384.",
    )
    parents: Literal["auto", "keep", "recompute", "offload"] = Field(
        default="auto",
        description="Activations of a partition while those below it run. keep: nothing is computed twice. recompute, "
        "offload (to the host): less memory. auto: the first of keep, offload, recompute that fits.",
    )
    sharing: Literal["always", "measured"] = Field(
        default="always",
        description="measured: step times are fitted at the start and kept in the run folder (costs.json), and a tree "
        "that sharing would slow down is trained branch by branch, to the same gradient. always: never.",
    )
    gradient_checkpointing: Literal["none", "reentrant", "non_reentrant"] = Field(
        default="none", description="Recompute activations in the backward pass, and by which of torch's two ways."
    )
    layers: Literal["auto", "stock", "compiled", "liger"] = Field(
        default="auto",
        description="How the model's layers run. stock: as transformers runs them. compiled: by torch.compile. liger: "
        "by the kernels of treering[liger], on CUDA. auto: on CUDA the one that ends the run first, as measured in the "
        "first step, compile time counted; stock elsewhere, on several ranks and in torch's deterministic mode.",
    )
    ranks: Literal["gathered", "sharded"] = Field(
        default="gathered",
        description="Under torchrun. gathered: weights stay gathered during a step, and gradients are reduced once. "
        "sharded: they are gathered in every pass, and all ranks run the same passes, so no tree may be cut.",
    )
    seed: Seed = Field(default=0, description="Seed of the random model's weights and of the order of the data.")

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.num_epochs is None and self.num_steps is None:
            raise ConfigError("training needs an end, and neither num_epochs nor num_steps is set; set one, or both")
        return self

    @model_validator(mode="after")
    def _check_normalizer(self) -> Self:
        if (self.normalizer == "constant") != (self.divisor is not None):
            raise ConfigError(
                f'divisor belongs to normalizer = "constant", and here normalizer = "{self.normalizer}" with divisor = '
                f"{self.divisor}; set both, or neither"
            )
        if self.layout == "packed" and self.normalizer == "tree_mean":
            raise ConfigError(
                'layout = "packed" has no trees, and normalizer = "tree_mean" averages over them; set another '
                'normalizer, or layout = "tree"'
            )
        return self
