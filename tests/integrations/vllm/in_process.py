"""LLMs in the test's own process, so that tests can inspect the drafter and correct the sampling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.integrations.vllm.llms import EXTENSION, PLAIN, VOCAB, K, drafts
from treering.integrations.vllm.plugin import hide_llvmlite
from treering.integrations.vllm.vllm_settings import environment_with

__all__ = ["K", "drafts"]

MAX_MODEL_LEN = 128
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def make_llm(model: Path, **settings: Any) -> Any:
    """Make an LLM of a saved model that samples in this process."""
    import vllm
    import vllm.triton_utils.dispatcher as dispatcher

    plain: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 24,
        "worker_extension_cls": EXTENSION,
    }
    # Tests import numba, and some leave the plugin out.
    hide_llvmlite(dispatcher)
    with environment_with(_ENVIRONMENT):
        return vllm.LLM(str(model), **PLAIN | plain | settings)


def runner_of(llm: Any) -> Any:
    """Return the model runner of an LLM in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def sampling(num_tokens: int | None = 40, **settings: Any) -> Any:
    """Return greedy sampling without a stop."""
    from vllm import SamplingParams

    plain: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": num_tokens}
    return SamplingParams(**plain | settings)


def prompts(num: int, size: int = 36, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, each of them twice."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size).tolist() for _ in range(num // 2)] * 2


def generate(llm: Any, contexts: Sequence[Sequence[int]], params: Any, **more: Any) -> list[Any]:
    """Return vLLM's outputs for prompts of token ids."""
    asked = [{"prompt_token_ids": list(ids)} for ids in contexts]
    outputs: list[Any] = llm.generate(asked, params, use_tqdm=False, **more)
    return outputs


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    """Return the sampled tokens of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def stats_of(llm: Any) -> dict[str, Any]:
    """Return the drafter's counts."""
    found: dict[str, Any] = llm.collective_rpc("treering_stats")[0]
    return found
