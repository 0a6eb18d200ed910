"""What a TRL trainer says about its rollouts: sampling parameters, and what the embedded engine cannot serve."""

from typing import Any

from treering.engine.request import Sampling
from treering.errors import ConfigError, UnsupportedError

_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters, by the names that TRL, Hugging Face and the engine share."""
_IGNORED = frozenset({"use_cache", "pad_token_id", "bos_token_id", "disable_compile", "cache_implementation"})
"""Arguments of `generate` that change no distribution."""
_READ = ("rollout_func", "tools", "environment_factories", "_generate_single_turn", "_tokenize_prompts", "_metrics")
"""What is read or replaced of a trainer; only GRPOTrainer has all."""


def sampling_of(trainer: Any) -> Sampling:
    """The sampling parameters of a trainer, `generation_kwargs` included.

    Raises:
        ConfigError: an argument of `generate` that the engine has not.

    Example: `GRPOConfig(temperature=0.9, top_k=0, max_completion_length=64)` is temperature 0.9, all tokens, 64 tokens.
    """
    values = {name: getattr(trainer, name) for name in _OWN}
    limit, stops = trainer.max_completion_length, tuple(trainer.eos_token_ids)
    for name, value in (trainer.args.generation_kwargs or {}).items():
        if name in _OWN:
            values[name] = value
        elif name in ("max_new_tokens", "eos_token_id"):
            given = value if isinstance(value, list | tuple) else (value,)
            limit, stops = (value, stops) if name == "max_new_tokens" else (limit, tuple(given))
        elif name not in _IGNORED and not (name == "do_sample" and value):
            raise ConfigError(
                f"HistoryRollouts samples with {', '.join(_OWN)}, got generation_kwargs[{name!r}]={value!r}; remove it"
            )
    if values["min_p"] is None:
        values["min_p"] = 0.0
    return Sampling(max_tokens=limit, stop_tokens=stops, **values)


def check_trainer(trainer: Any) -> None:
    """Refuses a trainer whose rollouts the engine in its process cannot sample, or not rightly.

    Raises:
        UnsupportedError: another trainer, images, sharded weights, or another engine; names it.
    """
    missing = next((name for name in _READ if not hasattr(trainer, name)), None)
    if missing is not None:
        raise UnsupportedError(
            f"HistoryRollouts samples for GRPOTrainer as in TRL 1.16, and this {type(trainer).__name__} has no "
            f"{missing}; take that one, or leave HistoryRollouts out"
        )
    if trainer._is_vlm:
        raise UnsupportedError(
            "HistoryRollouts samples from text alone, and this model takes images; use vLLM for its rollouts"
        )
    if trainer.use_vllm:
        raise UnsupportedError(
            "HistoryRollouts samples from the model in the trainer's process, and use_vllm=True starts another engine; "
            "set use_vllm=False, or leave HistoryRollouts out and make the trainer inside vllm_drafts"
        )
    kind = trainer.accelerator.distributed_type.value
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UnsupportedError(
            f"HistoryRollouts reads whole weights in every process, and {kind} shards them; use DDP, or vLLM for the "
            "rollouts"
        )


def check_text(images: Any, fields: Any) -> None:
    """Refuses prompts with images.

    Raises:
        UnsupportedError: images, or other fields of a multimodal model.
    """
    if images is not None or fields:
        raise UnsupportedError("HistoryRollouts samples from text alone, and a prompt holds images; leave them out")


def check_single_turn(trainer: Any) -> None:
    """Refuses a trainer whose rollouts have turns that `rollout_func` does not see.

    Raises:
        UnsupportedError: tools or environments.
    """
    if trainer.tools or getattr(trainer, "environment_factories", None):
        raise UnsupportedError(
            "TRL calls rollout_func for the first turn only, and model.generate after each tool call; leave "
            "rollout_func out and call HistoryRollouts().attach(trainer)"
        )
