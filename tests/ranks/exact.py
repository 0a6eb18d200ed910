"""Run by every rank: the gradients of each case against those of one process that trains the whole batch."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.image_models import build as build_with_images
from tests.image_models import forest_of, sequences_of
from tests.models import build as build_stock
from tests.models import global_norm
from tests.partitions import forced
from tests.ranks.batches import RankBatch, batches, tree
from tests.ranks.wraps import SHARDED, WHOLE, build, shard_layers
from treering import ranks
from treering.objectives import sft
from treering.ranks.setup import without_ddp
from treering.train.step import backward as measuring_backward
from treering.tree.forest import Forest

# On two ranks every batch runs with the plain wraps; other wraps, and more ranks, run the most demanding batches. What
# a wrap is does not depend on the number of ranks, so more of them run only these.
ALWAYS = ("skewed", "gspo in partitions")
PLAIN = ("layers", "tied")
ON_MORE_RANKS = (*PLAIN, "hybrid")


def backward(*args: Any, **options: Any) -> Any:
    """Run a step that keeps partitions, because measuring memory takes extra forwards."""
    with forced("keep"):
        return measuring_backward(*args, **options)


class Case(NamedTuple):
    wrap: str
    batch: str
    mode: str

    def __str__(self) -> str:
        return "/".join(self)


def cases(num_ranks: int) -> Iterator[Case]:
    names, is_pair = batches(num_ranks), num_ranks == 2
    for wrap, batch, mode in itertools.product(SHARDED, names, ("sharded", "gathered")):
        is_plain, is_uneven = wrap in PLAIN and is_pair, mode == "gathered" and batch == "uneven gspo"
        is_cut = batch.startswith("uneven") or "partitions" in batch
        fits = not (mode == "sharded" and is_cut) and (wrap != "hybrid" if is_pair else wrap in ON_MORE_RANKS)
        if (is_plain or is_uneven or batch in ALWAYS) and fits:
            yield Case(wrap, batch, mode)
    for wrap in WHOLE if is_pair else ("DDP",):
        for batch in names if is_pair and wrap == "DDP" else (*ALWAYS, "uneven gspo"):
            yield Case(f"whole {wrap}", batch, "gathered")


def run_cases(num_ranks: int, rank: int) -> dict[str, float]:
    """Return the largest relative error of a weight's gradient, by case."""
    expected: dict[tuple[str, str], dict[str, Tensor]] = {}
    errors = {}
    for case in cases(num_ranks):
        name = case.wrap.removeprefix("whole ")
        batch = batches(num_ranks)[case.batch]
        if (name, case.batch) not in expected:
            expected[name, case.batch] = alone(build(name), batch)
        wrap = (WHOLE if case.wrap.startswith("whole") else SHARDED)[name]
        errors[str(case)] = together(wrap(build(name)), batch, case, rank, expected[name, case.batch])
    return errors


def run_in_bfloat16(num_ranks: int, rank: int) -> dict[str, float]:
    """Compare a policy of bfloat16 weights and float32 sums with one process that sums the ranks' bfloat16 gradients.

    Each rank has one micro-batch, and the objective has no denominator, so that both round alike.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    groups = [tree(number) for number in range(num_ranks)]
    expected: dict[str, Tensor] = {}
    for group in groups:
        single = build_stock()
        for weight in single.parameters():
            # The policy casts only weights, not the buffer of rotations.
            weight.data = weight.data.bfloat16()
        backward(single, Forest.from_sequences(group), sft(normalizer="sum"), ranks="alone")
        for name, gradient in gradients(single).items():
            expected[name] = expected.get(name, 0.0) + gradient.float()
    errors = {}
    for mode in ("sharded", "gathered"):
        model = shard_layers(build_stock(), mp_policy=policy)
        ranks.prepare(model)
        backward(model, Forest.from_sequences(groups[rank]), sft(normalizer="sum"), ranks=mode)
        errors[mode] = error_of(gradients(model), expected)
    return errors


def run_images(num_ranks: int, rank: int) -> dict[str, float]:
    """Run a vision model that is whole on every rank; the last rank has a sequence with only text."""
    errors = {}
    for family in ("qwen3_vl", "gemma3"):
        sequences = sequences_of(family)
        text = [one for one in sequences if not one.placed]
        with_images = [one for one in sequences if one.placed]
        own = text if rank == num_ranks - 1 else with_images[rank :: num_ranks - 1]
        single = build_with_images(family).double()
        backward(single, forest_of(sequences), sft([one.mask for one in sequences]), ranks="alone")
        model = build_with_images(family).double()
        ranks.prepare(model)
        backward(model, forest_of(own), sft([one.mask for one in own]), max_tokens=40)
        errors[family] = error_of(gradients(model), gradients(single))
    return errors


def alone(model: nn.Module, batch: RankBatch) -> dict[str, Tensor]:
    """Return the gradients of one process."""
    objective = batch.make_objective(None)
    backward(model, batch.forests(None), objective, batch.max_tokens, ranks="alone")
    return gradients(model)


def together(model: nn.Module, batch: RankBatch, case: Case, rank: int, expected: dict[str, Tensor]) -> float:
    """Return the error of a step; or of two whose gradients add up, by a model and by the module inside DDP."""
    rank_group, mode = ranks.prepare(model), case.mode
    steps = [model, without_ddp(model)] if case.batch in ALWAYS or case.wrap == "whole DDP" else [model]
    for called in steps:
        result = backward(called, batch.forests(rank), batch.make_objective(rank), batch.max_tokens, ranks=mode)  # type: ignore[arg-type]
        assert result.plan.ranks == mode
    assert rank_group.size > 1
    means = {name: gradient / len(steps) for name, gradient in gradients(without_ddp(model)).items()}
    return error_of(means, expected)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name."""
    return {name: whole(weight) for name, weight in model.named_parameters() if weight.requires_grad}


def whole(weight: nn.Parameter) -> Tensor:
    gradient = weight.grad
    if gradient is None:
        return torch.zeros(weight.shape, dtype=weight.dtype)
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone().cpu()


def error_of(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return law 2's measure: relative L2 error, with a floor."""
    assert actual.keys() == expected.keys()
    floor = 1e-3 * global_norm(expected)
    return max(
        float((actual[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        for name, gradient in expected.items()
    )
