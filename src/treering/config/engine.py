"""The [engine], [sampling] and [history] sections of `treering train`. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, Positive
from treering.errors import ConfigError
from treering.types import MAX_TOKEN_ID

_UnitInterval = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class Sampling(Config):
    """How the tokens of a rollout are sampled.

    The distribution is the softmax of the logits over `temperature`, cut to the `top_k` likeliest tokens, then to the
    fewest likeliest tokens whose mass reaches `top_p`, then to the tokens at least `min_p` times as likely as the
    likeliest, and renormalised. `repetition_penalty` changes the logits before all of this, and `min_tokens` hides the
    stop tokens first. Order and definitions are those of Hugging Face's `generate`.

    `Rollout.logprobs` are of this distribution; `Rollout.policy_logprobs` are of the logits over `temperature`, without
    cuts, penalty and hidden tokens.

    Example: logits [2, 1, 0] at temperature 1 have the probabilities [0.665, 0.245, 0.090]; top_p=0.7 keeps the first
    two as [0.731, 0.269], top_k=1 only the first, min_p=0.3 the first two.
    """

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] = Field(
        default=256, description="Most tokens of a rollout, including those of an environment."
    )
    temperature: Positive = Field(
        default=1.0, description="Divides the logits, in training too; for greedy sampling set top_k=1."
    )
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = Field(
        default=None, description="Number of likeliest tokens to draw from; none or 0: all."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Probability mass of the likeliest tokens to draw from."
    )
    min_p: _UnitInterval = Field(
        default=0.0,
        description="Least probability of a drawn token, as a share of the likeliest token's; 0: no limit.",
    )
    repetition_penalty: Positive = Field(
        default=1.0,
        exclude=True,
        description="Divides the positive logits of earlier tokens and multiplies the negative ones; 1: no penalty.",
    )
    stop_tokens: Annotated[tuple[TokenId, ...], Field(strict=False)] = Field(
        default=(), exclude=True, description="Tokens that end a rollout; the rollout includes its stop token."
    )
    stop_strings: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        exclude=True,
        description="Strings that end a rollout with the token that completes one; needs an engine with a tokenizer.",
    )

    min_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0,
        exclude=True,
        description="Tokens of a rollout before which no stop token can be sampled and no stop string ends it.",
    )
    num_top_logprobs: Annotated[int, Field(ge=0, le=20)] = Field(
        default=0, exclude=True, description="Likeliest tokens whose log-probs a rollout records at each of its tokens."
    )

    @model_validator(mode="after")
    def _check_stops(self) -> "Sampling":
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}; lower it"
            )
        if "" in self.stop_strings:
            raise ConfigError('a stop string must have at least one character, got ""; remove it')
        return self


class DraftOptions(Config):
    """History of earlier rollouts, and drafts from it. These settings change speed, never a token."""

    drafts: Literal["on", "off"] = Field(
        default="on",
        description="on: draft tokens from the history. off: one token per rollout and forward pass (off-switch).",
    )
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30, description="Memory of the history and its index, in bytes."
    )
    max_draft: Annotated[int, Field(ge=1, le=64)] = Field(default=64, description="Most tokens per draft.")
    min_acceptance: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.018,
        description="Least acceptance chance of a first drafted token; later ones need more. Where longer passes cost "
        "more, as on CPUs, use about 0.4.",
    )
    sources: Annotated[tuple[Literal["history", "siblings", "own", "others"], ...], Field(strict=False)] = Field(
        default=("history", "siblings", "own", "others"),
        exclude=True,
        description="Sources of drafts: earlier epochs, the group's other rollouts, the rollout itself, earlier "
        "rollouts of other prompts.",
    )

    publish_new_after: Count = Field(
        default=4,
        exclude=True,
        description="Finished rollouts after which a prompt without history is published, so that siblings can draft "
        "from them; then at every doubling.",
    )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.drafts == "on" and not self.sources:
            raise ConfigError('drafts = "on" needs a source, and sources is empty; name one, or set drafts = "off"')
        if len(set(self.sources)) < len(self.sources):
            raise ConfigError(f"sources must be distinct, got {list(self.sources)}; remove the repetition")
        return self


class EngineConfig(Config):
    """Engine that samples."""

    kind: Literal["torch", "vllm"] = Field(
        default="torch",
        description="torch: the embedded engine, inside the loop or worker. vllm: vLLM; needs treering[vllm].",
    )
    max_batch: Count = Field(default=16, description="Most rollouts that run at a time.")
    max_tokens: Count | None = Field(
        default=None,
        description="Tokens whose keys and values fit; none: max_batch of the longest rollouts, and a step's prompts.",
    )
    num_threads: Count | None = Field(
        default=None,
        description="CPU threads while sampling, and logical CPUs that Ray reserves for each rollout worker; none: one "
        "below 10 M parameters, else as many as torch uses, or with workers an equal share of the cores and one CPU.",
    )
    backend: Literal["auto", "fused", "cuda", "plain"] = Field(
        default="auto",
        description="fused: the CPU path. cuda: our own kernels. plain: torch operations (off-switch). auto: the "
        "fastest available.",
    )
    verification: Literal["rejection", "exact"] = Field(
        default="rejection",
        description="With vllm and drafts. rejection: vLLM's own, exact in distribution. exact: the same tokens as "
        "without drafts; on CPU, where released builds need it, and on CUDA with VLLM_BATCH_INVARIANT=1.",
    )


def check_vllm(engine: EngineConfig, sampling: Sampling, *, old_logprobs: str) -> None:
    """Check the settings of a run that samples with vLLM.

    Raises:
        ConfigError: a backend of the other engine, or a cut without "recomputed" log-probs.
    """
    if engine.backend != "auto":
        raise ConfigError(
            f'engine.kind = "vllm" has its own kernels, got engine.backend = "{engine.backend}" of engine.kind = '
            '"torch"; '
            "remove it"
        )
    cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    if cuts and old_logprobs == "sampled":
        raise ConfigError(
            'vLLM gives no policy log-probs with top_k, top_p or min_p; set rl.old_logprobs = "recomputed", or '
            "remove them"
        )
