"""PrefixGrouper on one case, next to one branch at a time; runs in `.venv-peers`, without treering.

Usage: python -I prefix_grouper.py CASE.pt RESULT.json NUM_RUNS

PrefixGrouper expects from its host an attention function that supports bottom-right causal masks with padding.
FlashAttention does on CUDA; on CPU the adapter below gives SDPA a mask made once per batch, and none where plain causal
attention is the same, so that nothing but PrefixGrouper's own work is paid.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from prefix_grouper import PrefixGrouper
from prefix_grouper.utils.register_transformers import register_attention
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaAdapter:
    """Attention of [B, H, Q, D] over [B, G, K, D], the last query seeing all keys that are not padding."""

    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """By padding mask (which the group keeps alive) and number of queries; None means plain causal attention."""

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, is_token: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        at = (is_token.data_ptr(), query.shape[2])
        if at not in self.masks:
            self.masks[at] = _additive_mask(is_token.bool(), query)
        mask = self.masks[at]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=options["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2), None


def _additive_mask(is_token: Tensor, query: Tensor) -> Tensor | None:
    """[B, 1, Q, K] in the query's dtype from a padding mask [B, K]; None where it equals a square causal mask."""
    num_queries, num_keys = query.shape[2], is_token.shape[1]
    if num_queries == num_keys and bool(is_token.all()):
        return None
    first = num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(first) & is_token[:, None, None, :]
    # A padded query may see nothing, and a softmax over nothing is NaN: let it see itself.
    visible |= torch.eye(num_queries, num_keys, dtype=torch.bool).roll(first, 1)
    return torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))


def build_model(case: dict[str, Any]) -> PreTrainedModel:
    """The Qwen3 that the parent measures, with its weights."""
    model = Qwen3ForCausalLM(Qwen3Config(**case["settings"]))
    model.load_state_dict(case["weights"])
    return model.train()


def one_by_one(model: PreTrainedModel, case: dict[str, Any]) -> Step:
    """Stock SDPA, head on the rows that carry loss."""
    sequences, num_trained = case["sequences"], case["num_trained"]

    def step() -> None:
        model.config._attn_implementation = "sdpa"
        model.zero_grad()
        for ids in sequences:
            hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -num_trained - 1 : -1]
            nll = F.cross_entropy(model.lm_head(hidden), ids[-num_trained:], reduction="sum")
            (nll / (num_trained * len(sequences))).backward()

    return step


def grouped(model: PreTrainedModel, case: dict[str, Any]) -> Step:
    """PrefixGrouper: prompt once, responses after it; head on the rows that carry loss."""
    sequences, num_prompt = case["sequences"], case["num_prompt_tokens"]
    prompt, responses = sequences[0][None, :num_prompt], torch.stack([ids[num_prompt:] for ids in sequences])
    num_responses, length = responses.shape
    if case["num_trained"] != length:
        raise ValueError(f"every response token must be trained, got {case['num_trained']} of {length}")
    adapter = SdpaAdapter()

    def step() -> None:
        model.config._attn_implementation = "prefix_grouper_attention"
        AttentionInterface.register("adapted_sdpa", adapter)
        adapter.masks.clear()
        model.zero_grad()
        prompt_mask, response_mask = torch.ones_like(prompt), torch.ones_like(responses)
        group = PrefixGrouper.from_ungrouped_masks(prompt_mask, response_mask, num_responses, "cpu")
        ids = group.concat_input(prompt, prompt_mask, responses, response_mask)
        positions = torch.cat([torch.arange(num_prompt), num_prompt + torch.arange(length).repeat(num_responses)])
        hidden = model.model(
            input_ids=ids,
            position_ids=positions[None],
            use_cache=False,
            prefix_grouper=group,
            prefix_grouper_attn_func="adapted_sdpa",
        ).last_hidden_state
        scored = group.split_output(hidden, include_prefix_last=1)[2][:, :-1]
        F.cross_entropy(model.lm_head(scored).flatten(0, 1), responses.flatten()).backward()

    return step


def gradient_after(model: PreTrainedModel, step: Step) -> Tensor:
    """The whole gradient that a step leaves, float64; the step is warm afterwards."""
    step()
    return torch.cat([weight.grad.flatten().double() for weight in model.parameters()])


def process_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main(given: Path, answer: Path, num_runs: int) -> None:
    torch.set_num_threads(1)
    register_attention()
    case = torch.load(given, weights_only=True)
    model = build_model(case)
    flat, group = one_by_one(model, case), grouped(model, case)
    expected = gradient_after(model, flat)
    error = float((gradient_after(model, group) - expected).norm() / expected.norm())
    rounds = [(process_seconds(flat), process_seconds(group)) for _ in range(num_runs)]
    baseline_s, seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
    result = {
        "seconds": seconds,
        "baseline_s": baseline_s,
        "speedup": baseline_s / seconds,
        "grad_error": error,
        "versions": {
            "prefix_grouper": version("prefix_grouper"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    answer.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
