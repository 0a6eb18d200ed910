"""Tiny models and the LLMs that sample for them, shared by the tests of this folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from treering.integrations.vllm.vllm_settings import speculative_config

EXTENSION = "treering.integrations.vllm.WorkerExtension"

Cut = Callable[[torch.Tensor], torch.Tensor]
"""Maps the model's logits to those that are sampled."""
VOCAB = 64
MAX_MODEL_LEN = 256
MAX_BATCH = 8
K = 6
"""Tokens of a draft."""
PLAIN = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "logprobs_mode": "processed_logprobs",
}


def drafts() -> dict[str, Any]:
    """Return the arguments of an LLM with drafts, which vLLM changes."""
    return {"speculative_config": speculative_config(K), "worker_extension_cls": EXTENSION}


def build(*, tied: bool, seed: int = 0, vocab_size: int = VOCAB) -> Qwen3ForCausalLM:
    """Build a model whose tokens are far from equally likely."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        initializer_range=0.2,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config).eval()


def make_llm(model: Qwen3ForCausalLM, folder: Path, **settings: Any) -> Any:
    """Make an LLM in its own processes, as `treering train` does."""
    pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")
    import vllm

    model.save_pretrained(folder)
    # numba may be loaded here, and vLLM's CPU worker fails in a process that was forked from this one.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    plain: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_BATCH,
        "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "async_scheduling": False,
        "use_tqdm_on_load": False,
    }
    return vllm.LLM(str(folder), **PLAIN | plain | settings)


def greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return Hugging Face's greedy continuations of prompts of one size."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    found: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
    return found


def logprobs_of(model: torch.nn.Module, prompt: Any, tokens: Any, temperature: float = 1.0) -> Any:
    """Return Hugging Face's log-probs of tokens after a prompt, float64 [R]."""
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def z_of(model: torch.nn.Module, contexts: list[list[int]], rollouts: list[list[int]], cut: Cut = lambda x: x) -> float:
    """Return by how many standard deviations -log p of the tokens differs from their entropy, under Hugging Face."""
    size = len(contexts[0])
    total, variance = 0.0, 0.0
    for begin in range(0, len(contexts), 64):
        part = slice(begin, begin + 64)
        ids = torch.tensor([c + r for c, r in zip(contexts[part], rollouts[part], strict=True)])
        with torch.no_grad():
            logits = model(ids).logits[:, size - 1 : -1].double()
        logp = cut(logits).log_softmax(-1)
        p = logp.exp()
        minus = torch.where(p > 0, -logp, 0.0)
        entropy = (p * minus).sum(-1)
        chosen = -logp.gather(2, ids[:, size:, None])[..., 0]
        total += float((chosen - entropy).sum())
        variance += float(((p * minus**2).sum(-1) - entropy**2).sum())
    return total / variance**0.5


def disturb(model: torch.nn.Module, size: float = 0.03, seed: int = 1) -> None:
    """Update every weight, norms and the embedding included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn(weight.shape, generator=generator)


class Host:
    """A model and the LLM that samples for it; many engines of the tests use the two, one after another."""

    def __init__(self, model: Any, folder: Path, **settings: Any) -> None:
        self.model, self.llm = model, make_llm(model, folder, **settings)
        self._first = {name: weight.clone() for name, weight in model.state_dict().items()}

    def engine(self, **settings: Any) -> Any:
        """Return a new engine, with the current weights."""
        from treering.integrations.vllm import VLLMEngine

        states = self.llm.llm_engine.output_processor.request_states.values()
        self.llm.llm_engine.abort_request([state.external_req_id for state in states])
        return VLLMEngine(self.llm, self.model, **settings)

    def reset(self) -> None:
        """Restore the first weights."""
        self.model.load_state_dict(self._first)
