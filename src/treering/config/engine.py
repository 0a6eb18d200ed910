"""The [sampling] and [engine] sections of `treering train`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from treering.config.load import Config
from treering.config.values import Count, Positive, Seed
from treering.errors import ConfigError

_TORCH_ONLY = {"backend": "auto", "duplicate_rows": "auto", "continuation": "copy"}


class SamplingConfig(Config):
    """How the tokens of a rollout are sampled."""

    max_tokens: Count = Field(default=256, description="Tokens of a rollout, at most; those of an environment count.")
    temperature: Positive = Field(default=1.0, description="Divides the logits, in training too.")
    top_k: Count | None = Field(default=None, description="Tokens that can be drawn; none: all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Mass that can be drawn.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Tokens that can be drawn are at least so many times as likely as the likeliest."
    )
    repetition_penalty: Positive = Field(default=1.0, description="Lowers logits of tokens that stood before; 1: none.")


class EngineConfig(Config):
    """The engine that samples."""

    kind: Literal["torch", "vllm"] = Field(
        default="torch",
        description="torch: in the process of the loop or worker. vllm: vLLM beside it (pip install 'treering[vllm]').",
    )
    max_batch: Count = Field(default=16, description="Rollouts that run at one time.")
    max_tokens: Count | None = Field(
        default=None,
        description="Tokens that it can hold keys and values of; none: max_batch of the longest, and a step's prompts.",
    )
    max_prefill: Count = Field(default=512, description="Prompt and observed tokens per forward pass, at most.")
    num_threads: Count | None = Field(
        default=None,
        description="Threads while sampling on the CPU; none: as many as torch takes. A small model needs one.",
    )
    backend: Literal["auto", "fused", "cuda", "plain"] = Field(
        default="auto",
        description="fused: the CPU path. cuda: kernels of our own. plain: torch operations (off-switch). auto: the "
        "fastest that can.",
    )
    duplicate_rows: Literal["auto", "once", "each"] = Field(
        default="auto",
        description="once: rollouts with the same tokens so far are computed once. each: every one for itself "
        "(off-switch). auto: once on CPU, each elsewhere.",
    )
    continuation: Literal["copy", "prefill"] = Field(
        default="copy",
        description="copy: a later turn or a branch copies keys and values that the engine has. prefill: it computes "
        "all again (off-switch).",
    )
    verification: Literal["rejection", "exact"] = Field(
        default="rejection",
        description="With vllm and drafts. rejection: vLLM's own, right in distribution. exact: the tokens of no "
        "drafts; on CPU only, where released builds need it.",
    )
    seed: Seed = Field(default=0, description="Seed of the noise; with prompt, draw and place it gives every token.")


def check_vllm(engine: EngineConfig, sampling: SamplingConfig, *, old_logprobs: str, verify_costs: str) -> None:
    """Checks the settings of a run that samples with vLLM.

    Raises:
        ConfigError: a setting of the other engine, or a cut or penalty without "recomputed" log-probs.
    """
    others = [name for name, value in _TORCH_ONLY.items() if getattr(engine, name) != value]
    others += ['history.verify_costs = "measured"'] if verify_costs == "measured" else []
    if others:
        raise ConfigError(
            f'engine.kind = "vllm" has no {" and no ".join(others)}, which engine.kind = "torch" has; remove it'
        )
    cuts = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
    if cuts and old_logprobs == "sampled":
        raise ConfigError(
            "vLLM gives no log-probs of the policy where top_k, top_p, min_p or repetition_penalty change what is "
            'sampled; set rl.old_logprobs = "recomputed", or remove them'
        )
