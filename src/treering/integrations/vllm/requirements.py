"""How vLLM is asked for the drafter, and what the drafter refuses inside it, each with the setting that works."""

from typing import Any

from treering.errors import UnsupportedError

PROPOSER = "treering.integrations.vllm.HistoryProposer"
MAX_DRAFT = 64
"""Most tokens that a `treering.Drafter` drafts for a row."""


def speculative_config(max_draft: int) -> dict[str, Any]:
    """VLLM's argument of that name for drafts of up to so many tokens from history.

    Example: `LLM(model, speculative_config=speculative_config(16))`.
    """
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": max_draft}


def check_config(vllm_config: Any) -> None:
    """Refuses a configuration under which vLLM would not call the drafter, or call it too late.

    Raises:
        UnsupportedError: names what was set, and what to set.

    Example: a `VllmConfig` with asynchronous scheduling is refused, and `--no-async-scheduling` named.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise UnsupportedError(
            "HistoryProposer runs in vLLM's V1 model runner, and this configuration selects Model Runner V2, which "
            "calls no custom proposer; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise UnsupportedError(
            "HistoryProposer reads each step's tokens before it drafts for the next, got async_scheduling=True; set "
            "--no-async-scheduling"
        )
    most = vllm_config.speculative_config.num_speculative_tokens
    if not 1 <= most <= MAX_DRAFT:
        raise UnsupportedError(
            f"HistoryProposer drafts 1 to {MAX_DRAFT} tokens, got num_speculative_tokens={most}; 16 is usual"
        )
