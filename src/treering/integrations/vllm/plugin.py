"""The `vllm.general_plugins` entry point: gives the drafter what vLLM's documented contract leaves out."""

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from treering.integrations.vllm.proposer import HistoryProposer

_DRAFT = (
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
_SAMPLE = ("self", "logits", "spec_decode_metadata")


def register() -> None:
    """Changes vLLM's model runner for `HistoryProposer`; vLLM calls it in every process.

    The runner tells which requests its rows are, and samples steps without drafts as if there were no drafter. Other
    drafters are not touched. Where a method of the runner is not the known one, a warning says so: then the proposer
    works by the documented contract, or steps without drafts take vLLM's way of steps with some.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_runner(GPUModelRunner)


def wrap_runner(runner_class: Any) -> bool:
    """Wraps methods of a model runner's class; returns whether requests are known by their ids.

    Example: a class whose methods have other parameters than those of vLLM 0.32 stays as it is, with warnings.
    """
    _wrap(runner_class, "_sample", _SAMPLE, _sampling, "steps without drafts are verified as if they had some")
    return _wrap(runner_class, "propose_draft_token_ids", _DRAFT, _proposing, "requests are told apart by their tokens")


def _wrap(
    runner_class: Any, name: str, parameters: tuple[str, ...], wrapped: Callable[[Any], Any], otherwise: str
) -> bool:
    """Replaces a method once, if it has these parameters; else warns of what is so `otherwise`."""
    original: Any = getattr(runner_class, name, None)
    if getattr(original, "is_treering", False):
        return True
    found = () if original is None else tuple(inspect.signature(original).parameters)
    if found != parameters:
        warnings.warn(
            f"{otherwise}, because {runner_class.__name__}.{name} of this vLLM takes {', '.join(found) or 'nothing'} "
            f"instead of {', '.join(parameters)}",
            stacklevel=3,
        )
        return False
    replaced: Any = wraps(original)(wrapped(original))
    replaced.is_treering = True
    setattr(runner_class, name, replaced)
    return True


def _proposing(original: Any) -> Any:
    def propose_draft_token_ids(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, HistoryProposer):
            drafter.begin_step(self, scheduler_output)
        return original(self, scheduler_output, *args, **kwargs)

    return propose_draft_token_ids


def _sampling(original: Any) -> Any:
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        metadata = spec_decode_metadata
        is_ours = metadata is not None and isinstance(getattr(self, "drafter", None), HistoryProposer)
        # Without any draft there is one token a row to sample, as without a drafter.
        return original(self, logits, None if is_ours and not any(metadata.num_draft_tokens) else metadata)

    return _sample
