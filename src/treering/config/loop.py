"""The [rl] section of `treering train`: steps, groups, advantages and the loss. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.steps import StepsConfig
from treering.config.values import Count, NonNegative, Positive
from treering.errors import ConfigError

_UnitInterval = Annotated[float, Field(ge=0, le=1)]


class LoopConfig(StepsConfig):
    """Steps, groups, advantages and the loss."""

    prompts_per_step: Count = Field(default=8, description="Prompts, each one group and one tree, per step.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Rollouts per prompt and step.")
    estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo",
        description="Advantages. grpo: reward less the group's mean, over its deviation. dr_grpo: without the "
        "deviation. rloo: less the mean of the others.",
    )
    objective: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "distill"] = Field(
        default="grpo",
        description="The loss. grpo, dapo, dr_grpo: clipped per token, with three denominators. gspo, rloo: clipped "
        "per rollout. cispo: clipped weights, no token without a gradient. distill: the divergence from [teacher] at "
        "sampled tokens, whatever their rewards.",
    )
    clip: Annotated[tuple[_UnitInterval, NonNegative] | None, Field(strict=False)] = Field(
        default=None, description="Lower and upper clip of the ratio; none: the objective's own."
    )
    max_importance: Positive | None = Field(
        default=None, description="Cap of the importance weights that correct top_k and top_p; none: no weights."
    )
    min_importance: Positive | None = Field(
        default=None, description="Weights below become 0, where they are masked; needs max_importance."
    )
    importance: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        default=None,
        description="Whose weight is bounded, and what one beyond becomes: the bound (truncate) or 0 (mask); none: "
        "token_truncate. Needs max_importance.",
    )
    entropy_coefficient: NonNegative | None = Field(
        default=None, description="Factor of the entropy bonus; 0 measures the entropy only, none: neither."
    )
    kl: NonNegative = Field(
        default=0.0,
        description="Factor of the KL to the policy that the run began with (with [lora]: to the base model); 0: none, "
        "and no copy of it.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="loss: added to the loss of every sampled token. reward: its sum over a rollout is taken off the "
        "reward.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None,
        description="With d = logp - reference logp: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. none: k3 in the loss, "
        "k1 in the reward, which takes no other; k1 in the loss is refused.",
    )
    old_logprobs: Literal["sampled", "recomputed"] = Field(
        default="sampled",
        description="What ratios compare with. sampled: the engine's log-probs. recomputed: the trainer's own, before "
        "an update; for vllm with top_k, top_p, min_p or repetition_penalty, where it gives none.",
    )
    num_train_threads: Count | None = Field(
        default=None, description="Threads while training on the CPU; none: as many as torch takes."
    )
    staleness: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Step k is sampled by the weights after step k - 1 - staleness: from 1 on, steps are sampled while "
        "those before are trained. Needs runtime.workers.",
    )

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        """Refuses a KL that would not pull the policy towards its reference, or that the loop cannot measure."""
        if self.kl_estimator is not None and (self.kl_in == "reward") != (self.kl_estimator == "k1"):
            raise ConfigError(
                "in the loss k1 has a mean gradient of 0, and in the reward k1 alone has the gradient of the KL, and "
                f'here kl_in = "{self.kl_in}" with kl_estimator = "{self.kl_estimator}"; take k2 or k3 in the loss, or '
                "k1 in the reward"
            )
        if self.kl > 0 and self.objective == "distill":
            raise ConfigError(
                f'objective = "distill" has a teacher instead of a reference, and kl is {self.kl}; set kl = 0'
            )
        if self.kl > 0 and self.kl_in == "reward" and self.old_logprobs == "recomputed":
            raise ConfigError(
                'a KL in the reward reads the engine\'s log-probs, which old_logprobs = "recomputed" does without; set '
                'kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        """Refuses incomplete or contradictory bounds of importance weights."""
        most, least, form = self.max_importance, self.min_importance, self.importance
        if most is None and not (least is None and form is None):
            raise ConfigError(
                f'importance weights need max_importance, and here it is unset with importance = "{form}" and '
                f"min_importance = {least}; set it, or leave all three out"
            )
        if least is None or most is None:
            return self
        if least > most or not (form or "").endswith("_mask"):
            raise ConfigError(
                f"min_importance is at most max_importance and belongs to masks, and here min_importance = {least} "
                f'with max_importance = {most} and importance = "{form}"; lower it, or choose token_mask or '
                "sequence_mask"
            )
        return self
