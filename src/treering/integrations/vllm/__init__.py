"""Treering inside vLLM: drafts from history for its speculative decoding.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
      "model": "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}'

with `TREERING_HISTORY` set to the folder of a `HistoryStore`. Importing this package imports neither torch, numba nor
vLLM: numba imported before vLLM's CPU worker starts crashes it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Not lazily: the file has the function's name, and an import of the file would take its place here.
from treering.integrations.vllm.request_args import request_args as request_args

if TYPE_CHECKING:
    from treering.integrations.vllm.engine.vllm_engine import VLLMEngine as VLLMEngine
    from treering.integrations.vllm.plugin import register as register
    from treering.integrations.vllm.proposer import HistoryProposer as HistoryProposer
    from treering.integrations.vllm.recording import record as record
    from treering.integrations.vllm.worker_extension import WorkerExtension as WorkerExtension

_HOMES = {
    "HistoryProposer": "proposer",
    "VLLMEngine": "engine.vllm_engine",
    "WorkerExtension": "worker_extension",
    "record": "recording",
    "register": "plugin",
}
__all__ = [
    "HistoryProposer",
    "VLLMEngine",
    "WorkerExtension",
    "record",
    "register",
    "request_args",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
