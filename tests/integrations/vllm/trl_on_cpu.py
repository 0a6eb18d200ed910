"""TRL's GRPO trainer with vLLM on CPU: replacements of its device-only steps, and short runs of a tiny model.

On CPU vLLM packs weights for its kernels, so they are loaded by `reload_weights` and not one by one, and the NCCL of
server mode is missing. TRL passes neither a number format nor an eager mode to the LLM that it makes.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM and TRL: make vllm-test")
pytest.importorskip("trl", reason="needs vLLM and TRL: make vllm-test")

import vllm.triton_utils.dispatcher as dispatcher
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from tests.integrations.trl import runs
from tests.integrations.vllm.llms import VOCAB, build
from tests.integrations.vllm.shim import right_sampling
from tests.integrations.words import word_tokenizer
from treering.integrations.vllm.plugin import hide_llvmlite

NUM_PROMPTS, GROUP_SIZE, PROMPT_SIZE, SIZE = 8, 8, 5, 32
_LLM = {
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 1024,
}


@contextmanager
def trl_on_cpu() -> Iterator[None]:
    """Inside the block, trainers use a vLLM on CPU that samples correctly with drafts."""
    stock = vllm_generation.LLM
    with ExitStack() as stack:
        for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
            stack.enter_context(mock.patch.dict(os.environ, {name: value}))
        stack.enter_context(mock.patch.object(vllm_generation, "LLM", lambda **given: stock(**given | _LLM)))
        stack.enter_context(mock.patch.object(vllm_generation.VLLMGeneration, "sync_weights", _sync_weights))
        hide_llvmlite(dispatcher)
        stack.enter_context(right_sampling())
        yield


def _sync_weights(generation: Any) -> None:
    """Run TRL's colocated update by the method that vLLM has on CPU, which holds a tied head twice."""
    named = [(name, weight.detach().clone()) for name, weight in generation._iter_named_params()]
    if generation.model.config.tie_word_embeddings:
        named.append(("lm_head.weight", dict(named)["model.embed_tokens.weight"]))
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})
    generation.llm.reset_prefix_cache()


def save_model(folder: Path) -> Path:
    """Save a policy that prefers few tokens, so that it repeats itself."""
    model = build(tied=False)
    with torch.no_grad():
        model.lm_head.weight *= 3.0
    model.save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def prompts() -> list[str]:
    return [" ".join(f"w{2 + (7 * i + 3 * k) % (VOCAB - 2)}" for k in range(PROMPT_SIZE)) for i in range(NUM_PROMPTS)]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / SIZE for ids in completion_ids]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of vLLM: what was asked and answered, and the policy at that time."""

    policy: dict[str, torch.Tensor]
    prompts: list[list[int]]
    answer: tuple[Any, ...]

    @property
    def completions(self) -> list[list[int]]:
        return list(map(list, self.answer[1]))


@dataclass
class Calls:
    """Recorder that replaces a trainer's `VLLMGeneration` and keeps each call."""

    trainer: Any
    found: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        original = self.trainer.vllm_generation.generate

        def generate(prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            answer = original(prompts, *args, **kwargs)
            policy = {name: weight.clone() for name, weight in self.trainer.model.state_dict().items()}
            self.found.append(Call(policy=policy, prompts=[list(ids) for ids in prompts], answer=answer))
            return answer

        self.trainer.vllm_generation.generate = generate


class Replayed:
    """Stand-in for `VLLMGeneration` that gives the answers of another run, each with the policy of that time."""

    def __init__(self, model: Any, calls: list[Call]) -> None:
        self._model, self._calls = model, iter(calls)

    def sync_weights(self) -> None: ...

    def generate(self, **_: Any) -> tuple[Any, ...]:
        call = next(self._calls)
        self._model.load_state_dict(call.policy)
        return call.answer


def make_trainer(model: Path, out: Path, *, calls: list[Call] | None = None, **options: Any) -> GRPOTrainer:
    """Make a trainer with a step an epoch, so that each prompt comes again in the next step.

    With the `calls` of another run no vLLM starts.
    """
    plain: dict[str, Any] = {
        "per_device_train_batch_size": NUM_PROMPTS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": SIZE,
        "generation_kwargs": {"ignore_eos": True},
        "learning_rate": 0.3,
        "use_vllm": True,
        "vllm_max_model_length": 128,
    }
    args = GRPOConfig(output_dir=str(out), **runs.COMMON | plain | options)
    with ExitStack() as stack:
        if calls is not None:
            make = mock.patch.object(
                grpo_trainer, "VLLMGeneration", side_effect=lambda model, **_: Replayed(model, calls)
            )
            stack.enter_context(make)
        return GRPOTrainer(str(model), reward, args, Dataset.from_dict({"prompt": prompts()}))


def drafts_or_not(history: Path | None, max_draft: int) -> Any:
    """Return `vllm_drafts` on a history, or a context that does nothing."""
    from treering.integrations.trl import vllm_drafts

    return nullcontext() if history is None else vllm_drafts(history, max_draft=max_draft)
