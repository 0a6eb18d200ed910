"""Treering inside vLLM: drafts from history for its speculative decoding.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
      "model": "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}'

with `TREERING_HISTORY` set to the folder of a `HistoryStore`. Importing this package imports neither torch, numba nor
vLLM: vLLM's CPU worker crashes if numba was imported before it starts.
"""

from typing import TYPE_CHECKING

from treering.integrations.lazy import names_from

if TYPE_CHECKING:
    from treering.integrations.vllm.draft_session import record as record
    from treering.integrations.vllm.plugin import HistoryProposer as HistoryProposer
    from treering.integrations.vllm.plugin import WorkerExtension as WorkerExtension
    from treering.integrations.vllm.plugin import register as register
    from treering.integrations.vllm.vllm_engine import VLLMEngine as VLLMEngine
    from treering.integrations.vllm.vllm_settings import request_args as request_args
else:
    _HOMES = {
        "HistoryProposer": "plugin",
        "VLLMEngine": "vllm_engine",
        "WorkerExtension": "plugin",
        "record": "draft_session",
        "register": "plugin",
        "request_args": "vllm_settings",
    }
    __all__ = [*_HOMES]
    __getattr__ = names_from(__name__, _HOMES)
