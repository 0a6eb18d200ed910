"""Treering inside vLLM: drafts from history for its speculative decoding.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
      "model": "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}'

with `TREERING_HISTORY` set to the folder of a `HistoryStore`. Importing this package imports neither torch, numba nor
vLLM: numba imported before vLLM's CPU worker starts crashes it.
"""

from typing import TYPE_CHECKING

from treering.integrations.lazy import names_from

# Not lazily: the file has the function's name, and an import of the file would take its place here.
from treering.integrations.vllm.request_args import request_args as request_args

if TYPE_CHECKING:
    from treering.integrations.vllm.engine.vllm_engine import VLLMEngine as VLLMEngine
    from treering.integrations.vllm.plugin import register as register
    from treering.integrations.vllm.proposer import HistoryProposer as HistoryProposer
    from treering.integrations.vllm.recording import record as record
    from treering.integrations.vllm.worker_extension import WorkerExtension as WorkerExtension
else:
    _HOMES = {
        "HistoryProposer": "proposer",
        "VLLMEngine": "engine.vllm_engine",
        "WorkerExtension": "worker_extension",
        "record": "recording",
        "register": "plugin",
    }
    __all__ = [*_HOMES, "request_args"]
    __getattr__ = names_from(__name__, _HOMES)
