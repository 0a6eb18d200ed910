"""The `vllm.general_plugins` entry point: gives the drafter what vLLM's documented contract leaves out."""

import inspect
import warnings
from functools import wraps
from typing import Any

from treering.integrations.vllm.proposer import HistoryProposer

_PARAMETERS = (
    "self",
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)


def register() -> None:
    """Makes vLLM's model runner tell `HistoryProposer` which requests its rows are; vLLM calls it in every process.

    Other drafters are not touched. Where the runner's method is not the known one, a warning says so, and the proposer
    works by the documented contract.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_runner(GPUModelRunner)


def wrap_runner(runner_class: Any) -> bool:
    """Wraps `propose_draft_token_ids` of a model runner's class; returns whether it is wrapped.

    Example: a class whose method has other parameters than those of vLLM 0.32 stays as it is, with one warning.
    """
    original: Any = getattr(runner_class, "propose_draft_token_ids", None)
    if getattr(original, "is_treering", False):
        return True
    found = () if original is None else tuple(inspect.signature(original).parameters)
    if found != _PARAMETERS:
        warnings.warn(
            f"requests are told apart by their tokens, because {runner_class.__name__}.propose_draft_token_ids of this "
            f"vLLM takes {', '.join(found) or 'nothing'} instead of {', '.join(_PARAMETERS)}",
            stacklevel=2,
        )
        return False

    @wraps(original)
    def propose_draft_token_ids(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, HistoryProposer):
            drafter.begin_step(self, scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    propose_draft_token_ids.is_treering = True  # type: ignore[attr-defined]
    runner_class.propose_draft_token_ids = propose_draft_token_ids
    return True
