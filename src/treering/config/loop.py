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

    Advantages and loss are set separately: Dr. GRPO needs "dr_grpo" as `estimator` and as `objective`, and RLOO "rloo"
    as both.

    Example: `RlOptions(prompts_per_step=8, group_size=8, sampling=Sampling(max_tokens=64))` samples 64 rollouts a step.
    """

    prompts_per_step: Count = Field(default=8, description="Prompts, each one group and one tree, per step.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Rollouts per prompt and step.")
    estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        default="grpo",
        description="Advantages. grpo: reward less the group's mean, over its deviation. dr_grpo: without the "
        "deviation. rloo: less the mean of the others.",
    )
    objective: Annotated[str, AfterValidator(check_name)] = Field(
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
    num_iterations: Count = Field(
        default=1,
        description="Passes over the rollouts of a step (PPO epochs), each of num_minibatches updates; ratios keep the "
        "log-probs of before the first.",
    )
    num_minibatches: Count = Field(
        default=1, description="Updates of a pass: the trained groups are divided into so many parts, in order."
    )
    max_gen_batches: Count = Field(
        default=1,
        description="Dynamic sampling (DAPO): batches of prompts sampled for a step, at most, until prompts_per_step "
        "groups have different rewards; the rest is not trained. 1: one batch.",
    )
    overlong_buffer: Count | None = Field(
        default=None,
        description="Length penalty (DAPO): rewards fall linearly over the last so many of sampling.max_tokens tokens; "
        "none: no penalty.",
    )
    overlong_penalty: Positive = Field(
        default=1.0, description="What a rollout of sampling.max_tokens tokens loses; needs overlong_buffer."
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
        description="loss: k3 = exp(-d) - 1 + d with d = logp - reference logp is added to the loss of every sampled "
        "token. reward: the sum of d over a rollout is taken off its reward.",
    )
    old_logprobs: Literal["sampled", "recomputed"] = Field(
        default="sampled",
        description="What ratios compare with. sampled: the engine's log-probs. recomputed: the trainer's own, before "
        "an update; for vllm with top_k, top_p, min_p or repetition_penalty, where it gives none.",
    )
    num_train_threads: Count | None = Field(
        default=None, exclude=True, description="Threads while training on the CPU; none: as engine.num_threads."
    )
    staleness: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Step k is sampled by the weights after step k - 1 - staleness: from 1 on, steps are sampled while "
        "those before are trained. Needs runtime.workers.",
    )
    rehearse: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Idle rows sample rollouts of the next step early, with their own noise; its weights then draw the "
        "tokens again in a prefill, so that results stay. on: whenever a row is idle. auto: where enough stays, and "
        "never on a CPU. off: never. For the embedded engine in one process, and no episodes.",
    )
    sampling: Sampling = Field(default=Sampling(), exclude=True, description="How the tokens of a rollout are drawn.")

    @property
    def num_updates(self) -> int:
        """Updates of a step, at most."""
        return self.num_iterations * self.num_minibatches

    @property
    def _divides_by_default(self) -> bool:
        return self.normalizer is None and self.objective == "dr_grpo"

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        """Refuse a KL that the loop cannot measure."""
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
    def _check_penalty(self) -> Self:
        if self.overlong_buffer is None and "overlong_penalty" in self.model_fields_set:
            raise ConfigError(
                f"overlong_penalty = {self.overlong_penalty} is what the end of the buffer costs, and overlong_buffer "
                "is not set; set it, or remove overlong_penalty"
            )
        # A section of a file is checked with [sampling] once that is known, see `RlConfig.options`.
        is_long = self.overlong_buffer is not None and self.overlong_buffer > self.sampling.max_tokens
        if is_long and "sampling" in self.model_fields_set:
            raise ConfigError(
                f"overlong_buffer is the last part of a response's sampling.max_tokens = {self.sampling.max_tokens}, "
                f"got {self.overlong_buffer}; lower it"
            )
        return self
