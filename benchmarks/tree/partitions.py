"""Claim: a tree ten times the budget trains in partitions to the same gradient, in their memory, at hardly more time.

Two trees, one a single chain, whole and in partitions: parents kept and recomputed, for a loss of tokens (sft) and one
of whole sequences (gspo), whose pass without gradients is counted apart.
"""

from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common.saved_bytes import peak_saved_bytes
from benchmarks.common.timing import interleaved_medians, process_seconds
from benchmarks.tree.cases import SHAPE
from benchmarks.tree.steps import gradient, relative_error
from treering.objectives import Objective, gspo, sft
from treering.train.memory import ParentsChoice
from treering.train.step import BackwardResult, backward
from treering.tree.forest import Forest

BUDGET = 512
"""Tokens of a partition; the trees have ten times as many."""

PARTITIONS = "partitions"
"""Name of this part in `--only`."""

Parents = Literal["keep", "recompute"]
PARENTS: tuple[Parents, ...] = ("keep", "recompute")

OnWords = Callable[[str], None]


def big_tree() -> Forest:
    """A prompt, three middles and two leaves on each, `BUDGET` tokens every one: ten in all."""
    rng = np.random.default_rng(3)

    def run(first: int) -> list[int]:
        return [first, *rng.integers(0, SHAPE.vocab_size, BUDGET - 1).tolist()]

    prompt = run(0)
    middles = [[*prompt, *run(i)] for i in range(3)]
    return Forest.from_sequences([[*middle, *run(j)] for middle in middles for j in range(2)])


def big_chain() -> Forest:
    """One sequence of `10 * BUDGET` tokens."""
    return Forest.from_sequences([np.random.default_rng(4).integers(0, SHAPE.vocab_size, 10 * BUDGET)])


def measure_partitions(model: PreTrainedModel, num_runs: int, on_words: OnWords) -> list[dict[str, Any]]:
    """Both trees; the caller has set the threads.

    `seconds` are medians of process time for one forward and backward by objective and way, of which `scoring_s` is the
    pass without gradients of "gspo keep"; `grad_errors` relative L2 distances from the whole tree's gradient, in
    float32; `saved_bytes` peaks of saved tensors by way, of sft. `kept_bytes_share` is the peak with parents kept over
    that of one partition times the partitions of the longest chain, `recomputed_bytes_share` that with parents
    recomputed over one partition and the chain's keys and values.
    """
    trees = {"tree": big_tree(), "chain": big_chain()}
    return [_measure(model, name, tree, num_runs, on_words) for name, tree in trees.items()]


def _measure(model: PreTrainedModel, name: str, tree: Forest, num_runs: int, on_words: OnWords) -> dict[str, Any]:
    ways = _ways(model, tree)
    on_words(f"partitions, {name}: gradients")
    results, errors = _gradients(model, ways)
    on_words(f"partitions, {name}: memory")
    saved = {way: peak_saved_bytes(ways[f"sft {way}"], model.parameters()) for way in ("whole", *PARENTS)}
    one_chain = Forest.from_sequences([np.zeros(BUDGET, np.int32)])
    one = peak_saved_bytes(lambda: backward(model, one_chain, sft()), model.parameters())
    (cut,) = results["sft keep"].plan.partitioned
    key_value_bytes = 2 * 4 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_size * cut.chain_tokens
    scoring: list[float] = []
    steps = {key: _without_result(way, scoring if key == "gspo keep" else []) for key, way in ways.items()}
    seconds = interleaved_medians(
        steps, num_runs, process_seconds, lambda done, total: on_words(f"partitions, {name}: run {done} of {total}")
    )
    model.zero_grad()
    return {
        "tree": name,
        "unique_tokens": tree.num_tokens,
        "max_tokens": BUDGET,
        "num_partitions": len(cut.partitions),
        "chain_tokens": cut.chain_tokens,
        "num_recomputed_tokens": {way: results[f"sft {way}"].num_recomputed_tokens for way in PARENTS},
        "seconds": seconds,
        "scoring_s": float(np.median(scoring)),
        "saved_bytes": saved,
        "one_partition_bytes": one,
        "kept_bytes_share": saved["keep"] / (one * cut.chain_tokens / BUDGET),
        "recomputed_bytes_share": saved["recompute"] / (one + key_value_bytes),
        "grad_errors": errors,
    }


def _gradients(
    model: PreTrainedModel, ways: dict[str, Callable[[], BackwardResult]]
) -> tuple[dict[str, BackwardResult], dict[str, float]]:
    """What each way gives, and how far its gradient is from that of the whole tree."""
    results: dict[str, BackwardResult] = {}
    gradients: dict[str, Tensor] = {}
    for key, way in ways.items():
        model.zero_grad()
        results[key] = way()
        gradients[key] = gradient(model)
    wholes = {key: gradients[f"{key.split()[0]} whole"] for key in ways}
    return results, {key: relative_error(gradients[key], wholes[key]) for key in ways}


def _ways(model: PreTrainedModel, tree: Forest) -> dict[str, Callable[[], BackwardResult]]:
    objectives = {"sft": sft(), "gspo": _sequence_objective(tree)}
    ways: dict[str, Callable[[], BackwardResult]] = {}
    for name, objective in objectives.items():
        ways[f"{name} whole"] = _way(model, tree, objective, None, "keep")
        for parents in PARENTS:
            ways[f"{name} {parents}"] = _way(model, tree, objective, BUDGET, parents)
    return ways


def _way(
    model: PreTrainedModel, tree: Forest, objective: Objective, max_tokens: int | None, parents: Parents
) -> Callable[[], BackwardResult]:
    def run() -> BackwardResult:
        # What a step does by itself depends on free memory.
        choice = ParentsChoice(keeps=parents == "keep", reason="benchmark")
        with mock.patch("treering.train.step.choose_parents", return_value=choice):
            return backward(model, tree, objective, max_tokens)

    return run


def _sequence_objective(tree: Forest) -> Objective:
    """A loss of whole sequences: old log-probs make it look at their ratios; the wide clip cuts no gradient."""
    lengths = tree.branch_length.tolist()
    uniform = -float(np.log(SHAPE.vocab_size))
    return gspo(
        np.linspace(-1.0, 1.0, len(lengths)) + 1.5,
        [[1] * length for length in lengths],
        [[uniform] * length for length in lengths],
        (1.0, 10.0),
    )


def _without_result(way: Callable[[], BackwardResult], scoring: list[float]) -> Callable[[], None]:
    def step() -> None:
        scoring.append(way().scoring_s)

    return step
