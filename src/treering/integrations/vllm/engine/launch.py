"""Makes the LLM that a run samples with: in processes of its own, of the run's model, with the settings it needs."""

import copy
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from treering.extras import require
from treering.integrations.vllm.engine.guard import end_with_this_process
from treering.integrations.vllm.engine.llm_requirements import EXTENSION
from treering.integrations.vllm.engine.weights import checkpoint_of
from treering.integrations.vllm.requirements import speculative_config
from treering.integrations.vllm.settings import CONFIG_VARIABLE, HISTORY_VARIABLE
from treering.model.wrappers import unwrap
from treering.runtime.ipc.environment import environment_with

_BLOCK_SIZE = 32
"""Tokens of keys and values that are allocated at a time; a prompt shares whole blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsInVLLM:
    """What the drafter inside vLLM is made with."""

    history: Path
    """Folder of a `HistoryStore`."""
    max_draft: int
    """Tokens per draft, at most."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The lines of the file that `TREERING_VLLM_CONFIG` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMSettings:
    """The settings of an LLM; the rest follows from the model.

    Example: `LLMSettings(max_batch=16, max_model_len=512, num_slots=8192, dtype="float32")` holds 16 such rollouts.
    """

    max_batch: int
    """Rollouts that run at one time."""
    max_model_len: int
    """Longest prompt and rollout together, in tokens."""
    num_slots: int
    """Tokens whose keys and values fit."""
    dtype: str
    """What vLLM computes in: "float32" or "bfloat16"."""
    max_prefill: int = 512
    """Prompt tokens per pass, at most; on CPU a prompt is never split, so that a longer one counts."""
    num_threads: int | None = None
    """Threads on CPU; None leaves them to vLLM, which takes every core."""
    drafts: DraftsInVLLM | None = None
    """None drafts nothing."""


def make_llm(model: nn.Module, settings: LLMSettings) -> Any:
    """A `vllm.LLM` for `VLLMEngine`, started with the model's present weights; it ends with this process.

    vLLM runs in processes that this one spawns: its CPU worker fails where numba is imported already. They read this
    process's environment; the variables that are set for them are set back.

    Args:
        model: a Hugging Face causal language model.
        settings: see `LLMSettings`.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    require("an engine of kind vllm", "vllm")
    own: Any = unwrap(model).model
    with checkpoint_of(model, has_tied_head=False) as folder, environment_with(_variables(settings, folder)):
        config = copy.deepcopy(own.config)
        # A model that was never saved has no name of its class, and vLLM would take a general one.
        config.architectures = [type(own).__name__]
        config.save_pretrained(folder)
        import vllm
        from vllm.platforms import current_platform

        others = {process.pid for process in multiprocessing.active_children()}
        llm = vllm.LLM(str(folder), **_arguments(own.config, settings, is_cpu=current_platform.is_cpu()))
    started = {process.pid for process in multiprocessing.active_children()} - others
    # An attribute of the LLM, so that it lives as long.
    llm.treering_guard = end_with_this_process(pid for pid in started if pid is not None)
    return llm


def _arguments(config: Any, settings: LLMSettings, *, is_cpu: bool) -> dict[str, Any]:
    drafts = settings.drafts
    num_drafted = 0 if drafts is None else drafts.max_draft
    per_pass = settings.max_prefill + settings.max_batch * (1 + num_drafted)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_batch,
        "max_num_batched_tokens": max(per_pass, settings.max_model_len) if is_cpu else per_pass,
        "enable_chunked_prefill": not is_cpu,
        # Compiling takes minutes on CPUs.
        "enforce_eager": is_cpu,
        "block_size": _BLOCK_SIZE,
        "kv_cache_memory_bytes": _num_blocks(settings, num_drafted)
        * _BLOCK_SIZE
        * _token_bytes(config, settings.dtype),
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "use_tqdm_on_load": False,
    }
    if drafts is not None:
        arguments["speculative_config"] = speculative_config(drafts.max_draft)
        arguments |= {"worker_extension_cls": EXTENSION, "per_request_spec_decode_metrics": "summary"}
    return arguments


def _num_blocks(settings: LLMSettings, num_drafted: int) -> int:
    """Blocks for the tokens, for the begun block of each rollout with its drafts, and for one that vLLM keeps."""
    most = max(settings.num_slots, settings.max_model_len)
    return most // _BLOCK_SIZE + settings.max_batch * (2 + num_drafted // _BLOCK_SIZE) + 2


def _token_bytes(config: Any, dtype: str) -> int:
    """Bytes of the keys and values of one token."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * num_heads * head_size * (4 if dtype == "float32" else 2))


def _variables(settings: LLMSettings, folder: Path) -> dict[str, str]:
    """The environment of vLLM's processes; a file that they read at their start goes into the folder."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Standard output is the run's result.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if settings.num_threads is not None:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.num_threads)}
    if settings.drafts is not None:
        file = folder / "drafts.toml"
        file.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in settings.drafts.settings.items()))
        found |= {HISTORY_VARIABLE: str(settings.drafts.history.resolve()), CONFIG_VARIABLE: str(file)}
    return found


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
