"""Claim: a TRL trainer's micro-batch trains faster by about what its rows share, and no slower if they share nothing.

`python -m benchmarks trl` runs a forward with TRL's fused head and a backward, stock and with `treering.patch`, on one
thread, in turns, by process time. On CPU TRL scores every position, on CUDA labelled ones only: here both sides score
labelled ones only, so that the figures say what sharing saves. The stock path computes padding as well, which the FLOP
bound leaves out: real rows of unequal length gain more than it says.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering
from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import chosen, environment, interleaved_medians, one_thread, process_seconds
from benchmarks.tree.sets import find_source
from benchmarks.trl.cases import Case, group, real
from treering.extras import require
from treering.model.patch import TreePatch
from treering.tree.forest import Forest
from treering.tree.stats import Work, flat_work, train_flops, tree_work
from treering.types import ModelShape

NOTE = "about five minutes"
TABLES = {
    "cases": (
        *("case", "token_ratio", "flop_bound", "stock_s", "tree_s", "speedup", "share_of_flop_bound"),
        *("gradient_difference", "pack_us_per_flat_token"),
    ),
}

SETS = ("toolbench", "hotpotqa")
SAMPLE_TOKENS = 8_000
SYNTHETIC = {
    **{f"group_{size}": partial(group, size, is_shared=True) for size in (260, 2_000, 32_000, 152_000)},
    **{f"sft_{size}": partial(group, size, is_shared=True, trains_prompts=True) for size in (2_000, 32_000, 152_000)},
    "nothing_shared_260": lambda: group(260, is_shared=False),
    "nothing_shared_32000": lambda: group(32_000, is_shared=False),
}


def measure(
    *,
    num_runs: int = 5,
    only: Sequence[str] | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Every case, stock and on trees, next to the bound."""
    require("python -m benchmarks trl", "torch", "transformers", "trl")
    source = find_source()
    names = chosen(only or (), [*SYNTHETIC, *(SETS if source else ())])
    rows = []
    with one_thread(), labelled_positions_only():
        for name in names:
            on_progress(f"measuring {name}")
            case = SYNTHETIC[name]() if name in SYNTHETIC else real(source, name, SAMPLE_TOKENS)  # type: ignore[arg-type]
            rows.append(measure_case(case, num_runs))
    notes = [] if source else ["no real sets: TREERING_DATA names no folder"]
    import trl

    facts = environment(threads=1, runs=num_runs, trl=trl.__version__)
    return {"cases": rows, "notes": notes, "environment": facts}


@contextmanager
def labelled_positions_only() -> Iterator[None]:
    """Inside, TRL's fused head scores labelled positions only, as it does on CUDA."""
    import trl.trainer.utils

    asked = trl.trainer.utils._use_triton
    trl.trainer.utils._use_triton = lambda device: True
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = asked


def measure_case(case: Case, num_runs: int) -> dict[str, Any]:
    """One case's seconds, bounds, gradient difference, and the time of packing."""
    model = build(case.vocab_size)
    batches = case.tensors()
    patched = treering.patch(model)
    stock, tree = _steps(model, patched, batches)
    expected = _gradients(model, stock)
    found = _gradients(model, tree)
    counts = patched.take_counts()
    seconds = interleaved_medians({"stock": stock, "tree": tree}, num_runs, process_seconds)
    forests = [Forest.from_sequences(rows) for rows, _ in case.batches]
    shape = shape_of(model)
    flat = flops(shape, flat_work(np.array([len(row) for row in case.rows])), case.num_labels)
    flop_bound = flat / flops(shape, tree_work(forests), num_pairs(case))
    pack_s = interleaved_medians({"ours": lambda: _merge(batches)}, num_runs, process_seconds)["ours"]
    speedup = seconds["stock"] / seconds["tree"]
    return {
        "case": case.name,
        "vocab_size": case.vocab_size,
        "flat_tokens": counts.num_flat_tokens,
        "padded_tokens": sum(batch["input_ids"].numel() for batch in batches),
        "tokens": counts.num_tokens,
        "token_ratio": counts.token_ratio,
        "flop_bound": flop_bound,
        "stock_s": seconds["stock"],
        "tree_s": seconds["tree"],
        "speedup": speedup,
        "share_of_flop_bound": speedup / flop_bound,
        "gradient_difference": float((found - expected).norm() / expected.norm()),
        "pack_us_per_flat_token": 1e6 * pack_s / counts.num_flat_tokens,
    }


def flops(shape: ModelShape, work: Work, num_scored: int) -> int:
    """FLOPs of forward and backward where the head scores some positions only."""
    head = 6 * shape.hidden_size * shape.vocab_size
    return train_flops(shape, work.num_tokens, work.num_pairs) + head * (num_scored - work.num_tokens)


def num_pairs(case: Case) -> int:
    """Distinct tokens with a label, batch by batch: what a tree's head scores."""
    total = 0
    for rows, masks in case.batches:
        forest = Forest.from_sequences(rows)
        labelled = [forest.path(i)[1:][np.asarray(list(mask), bool)[1:]] for i, mask in enumerate(masks)]
        total += np.unique(np.concatenate(labelled)).size
    return total


def build(vocab_size: int) -> Any:
    """A Qwen3 of hidden size 256 and 4 layers with seeded random weights and TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=8192,
    )
    model = Qwen3ForCausalLM(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def shape_of(model: Any) -> ModelShape:
    """What FLOPs are counted of."""
    config = model.config
    return ModelShape(
        name="qwen3-4x256",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
    )


def _steps(model: Any, patched: TreePatch, batches: list[dict[str, Any]]) -> tuple[Callable[[], None], ...]:
    """The stock step and the tree step: gradients are left in the model."""
    weights = [torch.linspace(-1, 1, batch["labels"].shape[0])[:, None] for batch in batches]

    def tree() -> None:
        model.zero_grad(set_to_none=True)
        for batch, weight in zip(batches, weights, strict=True):
            (model(**batch, use_cache=False, fused_lm_head=True).log_probs * weight).sum().backward()

    def stock() -> None:
        with patched.flat():
            tree()

    return stock, tree


def _gradients(model: Any, step: Callable[[], None]) -> torch.Tensor:
    step()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def _merge(batches: list[dict[str, Any]]) -> None:
    for batch in batches:
        Forest.from_padded(batch["input_ids"], batch["attention_mask"])
