"""The [engine], [sampling] and [history] sections of `treering train`. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, Positive, Seed
from treering.errors import ConfigError
from treering.types import MAX_TOKEN_ID

_UnitInterval = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class Sampling(Config):
    """How the tokens of a rollout are sampled.

    The distribution is the softmax of the logits over `temperature`, cut to the `top_k` likeliest tokens, then to the
    fewest likeliest tokens whose mass reaches `top_p`, then to the tokens at least `min_p` times as likely as the
    likeliest, and renormalised. `repetition_penalty` changes the logits before all of this. The order and the
    definitions are those of Hugging Face's `generate`.

    `Rollout.logprobs` are of this distribution, `Rollout.policy_logprobs` of the logits over `temperature` alone:
    neither a cut nor a penalty counts there.

    Example: logits [2, 1, 0] at temperature 1 have the probabilities [0.665, 0.245, 0.090]; top_p=0.7 keeps the first
    two as [0.731, 0.269], top_k=1 the first alone, min_p=0.3 the first two.
    """

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] = Field(
        default=256, description="Tokens of a rollout, at most; those of an environment count."
    )
    temperature: Positive = Field(
        default=1.0, description="Divides the logits, in training too; for the likeliest token always set top_k=1."
    )
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = Field(
        default=None, description="Tokens that can be drawn; none or 0: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Mass that can be drawn.")
    min_p: _UnitInterval = Field(
        default=0.0,
        description="Least probability of a token that can be drawn, as a share of the likeliest token's; 0: all.",
    )
    repetition_penalty: Positive = Field(
        default=1.0,
        description="Divides the positive logits of tokens that stood before, and multiplies the negative ones; 1: "
        "none.",
    )
    stop_tokens: Annotated[tuple[TokenId, ...], Field(strict=False)] = Field(
        default=(), exclude=True, description="Any of these ends a rollout, whose last token it is."
    )
    stop_strings: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        exclude=True,
        description="A rollout ends with the token that completes one of these; needs an engine with a tokenizer.",
    )

    @model_validator(mode="after")
    def _check_stops(self) -> "Sampling":
        if "" in self.stop_strings:
            raise ConfigError('a stop string holds at least one character, got ""; remove it')
        return self


class DraftOptions(Config):
    """The history of earlier rollouts, and how tokens are drafted from it. Changes speed, never a token."""

    drafts: Literal["on", "off"] = Field(
        default="on", description="off: one token per rollout and forward pass (off-switch)."
    )
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30, description="Memory of the history, its index included, in bytes."
    )
    max_epochs: Count = Field(default=2, description="Policy versions that are kept of each prompt.")
    max_draft: Annotated[int, Field(ge=1, le=64)] = Field(default=64, description="Tokens per draft, at most.")
    min_acceptance: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.018,
        description="Least chance of a first drafted token; later ones need more. Where a pass over more tokens takes "
        "longer, as on CPUs, drafts pay with about 0.4.",
    )
    sources: Annotated[tuple[Literal["history", "siblings", "own", "others"], ...], Field(strict=False)] = Field(
        default=("history", "siblings", "own", "others"),
        exclude=True,
        description="Where drafts come from: earlier epochs, the group's other rollouts, the rollout itself, earlier "
        "rollouts of other prompts.",
    )

    publish_new_after: Count = Field(
        default=4,
        exclude=True,
        description="Publish a prompt without history after this many finished rollouts, so that siblings can draft "
        "from them; then at every doubling.",
    )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.drafts == "on" and not self.sources:
            raise ConfigError('drafts = "on" needs a source, and sources is empty; name one, or set drafts = "off"')
        if len(set(self.sources)) < len(self.sources):
            raise ConfigError(
                f"a source is named once, and sources = {list(self.sources)} repeats one; remove the repetition"
            )
        return self


class EngineConfig(Config):
    """The engine that samples."""

    kind: Literal["torch", "vllm"] = Field(
        default="torch",
        description="torch: in the process of the loop or worker. vllm: vLLM beside it; needs treering[vllm].",
    )
    max_batch: Count = Field(default=16, description="Rollouts that run at one time.")
    max_tokens: Count | None = Field(
        default=None,
        description="Tokens that it can hold keys and values of; none: max_batch of the longest, and a step's prompts.",
    )
    num_threads: Count | None = Field(
        default=None,
        description="Threads while sampling on the CPU; none: one below 10 M parameters, else as many as torch takes.",
    )
    backend: Literal["auto", "fused", "cuda", "plain"] = Field(
        default="auto",
        description="fused: the CPU path. cuda: kernels of our own. plain: torch operations (off-switch). auto: the "
        "fastest that can.",
    )
    verification: Literal["rejection", "exact"] = Field(
        default="rejection",
        description="With vllm and drafts. rejection: vLLM's own, right in distribution. exact: the tokens of no "
        "drafts; on CPU only, where released builds need it.",
    )
    seed: Seed = Field(default=0, description="Seed of the noise; with prompt, draw and place it gives every token.")


def check_vllm(engine: EngineConfig, sampling: Sampling, *, old_logprobs: str) -> None:
    """Check the settings of a run that samples with vLLM.

    Raises:
        ConfigError: a backend of the other engine, or a cut or penalty without "recomputed" log-probs.
    """
    if engine.backend != "auto":
        raise ConfigError(
            f'engine.kind = "vllm" has its own kernels, and engine.backend = "{engine.backend}" is of engine.kind = '
            '"torch"; remove it'
        )
    cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
    if cuts and old_logprobs == "sampled":
        raise ConfigError(
            "vLLM gives no log-probs of the policy where top_k, top_p, min_p or repetition_penalty change what is "
            'sampled; set rl.old_logprobs = "recomputed", or remove them'
        )
