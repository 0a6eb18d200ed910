"""The [rl] section of `treering train`: steps, groups, advantages and the loss. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from treering.config.engine import Sampling
from treering.config.objective_names import check_name
from treering.config.steps import StepsOptions
from treering.config.values import Count, NonNegative, Positive
from treering.errors import ConfigError

_UnitInterval = Annotated[float, Field(ge=0, le=1)]


class RlOptions(StepsOptions):
    """Steps, groups, advantages and the loss; the defaults are GRPO's.

    Advantages and loss are separate settings: Dr. GRPO needs "dr_grpo" as both `estimator` and `objective`, and RLOO
    needs "rloo" as both.

    Example: `RlOptions(prompts_per_step=8, group_size=8, sampling=Sampling(max_tokens=64))` samples 64 rollouts
    per step.
    """

    prompts_per_step: Count = Field(default=8, description="Prompts per step; each is one group and one tree.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Rollouts per prompt and step.")
    estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo",
        description="Advantages. grpo: reward minus the group's mean, over its deviation. dr_grpo: without the "
        "deviation. rloo: minus the mean of the others.",
    )
    objective: Annotated[str, AfterValidator(check_name)] = Field(
        default="grpo",
        description="Loss. grpo, dapo, dr_grpo: clipped per token, with three denominators. gspo, rloo: clipped per "
        "rollout. cispo: clipped weights, every token has a gradient. distill: the divergence from [teacher] at "
        "sampled tokens, without rewards.",
    )
    clip: Annotated[tuple[_UnitInterval, NonNegative] | None, Field(strict=False)] = Field(
        default=None, description="Lower and upper clip of the ratio; none: the objective's default."
    )
    max_importance: Positive | None = Field(
        default=None, description="Cap of the importance weights that correct top_k and top_p; none: no weights."
    )
    num_iterations: Count = Field(
        default=1,
        description="Passes over the rollouts of a step (PPO epochs), each with num_minibatches updates; ratios use "
        "the log-probs from before the first update.",
    )
    num_minibatches: Count = Field(
        default=1, description="Updates per pass, each on one part of the trained groups, in order."
    )
    max_gen_batches: Count = Field(
        default=1,
        description="Dynamic sampling (DAPO): most batches of prompts per step, sampled until prompts_per_step "
        "groups have different rewards; further groups are dropped. 1: one batch.",
    )
    overlong_buffer: Count | None = Field(
        default=None,
        description="Length penalty (DAPO): number of last tokens of sampling.max_tokens over which rewards fall "
        "linearly, by 1 in all; none: no penalty.",
    )
    entropy_coefficient: NonNegative | None = Field(
        default=None, description="Factor of the entropy bonus; 0: only measure entropy; none: neither."
    )
    kl: NonNegative = Field(
        default=0.0,
        description="Factor of the KL to the initial policy (with [lora]: to the base model); 0: no KL, and no copy "
        "of that policy.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="loss: adds k3 = exp(-d) - 1 + d with d = logp - reference logp to the loss of every sampled "
        "token. reward: subtracts the sum of d over a rollout from its reward.",
    )
    old_logprobs: Literal["sampled", "recomputed"] = Field(
        default="sampled",
        description="Log-probs in the denominator of the ratio. sampled: the engine's. recomputed: the trainer's, from "
        "before the update; needed for vllm with top_k, top_p or min_p.",
    )
    num_train_threads: Count | None = Field(
        default=None, exclude=True, description="CPU threads while training; none: as engine.num_threads."
    )
    staleness: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Step k is sampled with the weights after step k - 1 - staleness: from 1 on, steps are sampled "
        "while earlier ones are trained. Needs runtime.workers.",
    )
    rehearse: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Idle rows sample rollouts of the next step early, with their own noise; the new weights then "
        "verify the tokens in a prefill, so results do not change. on: whenever a row is idle. auto: where enough "
        "tokens are kept, and never on a CPU. off: never. Workers rehearse while a step is trained, too. Not for "
        "episodes; "
        'engine.kind "vllm" needs engine.verification "exact".',
    )
    sampling: Sampling = Field(default=Sampling(), exclude=True, description="How the tokens of a rollout are sampled.")

    @property
    def num_updates(self) -> int:
        """Most updates of a step."""
        return self.num_iterations * self.num_minibatches

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl > 0 and self.objective == "distill":
            raise ConfigError(
                f'objective = "distill" has a teacher instead of a reference, got kl = {self.kl}; set kl = 0'
            )
        if self.kl > 0 and self.kl_in == "reward" and self.old_logprobs == "recomputed":
            raise ConfigError(
                'kl_in = "reward" reads the engine\'s log-probs, which old_logprobs = "recomputed" does not keep; set '
                'kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        # A section of a file is checked together with [sampling] in `RlConfig.options`.
        is_long = self.overlong_buffer is not None and self.overlong_buffer > self.sampling.max_tokens
        if is_long and "sampling" in self.model_fields_set:
            raise ConfigError(
                f"overlong_buffer must be at most sampling.max_tokens = {self.sampling.max_tokens}, "
                f"got {self.overlong_buffer}; lower it"
            )
        return self
