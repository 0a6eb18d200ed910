"""Treering inside vLLM: drafts from history for its speculative decoding.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
      "model": "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}'

with `TREERING_HISTORY` set to the folder of a `HistoryStore`. Importing this package imports neither torch, numba nor
vLLM: numba imported before vLLM's CPU worker starts crashes it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.integrations.vllm.engine import VLLMEngine as VLLMEngine
    from treering.integrations.vllm.request_args import request_args as request_args

_HOMES = {
    "VLLMEngine": "engine",
    "request_args": "request_args",
}
__all__ = [
    "VLLMEngine",
    "request_args",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
