"""Run by every rank: which collectives a step calls, with the dtype and size of what each sends."""

import gc
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import build
from tests.partitions import forced
from tests.ranks.batches import tree
from tests.ranks.exact import error_of, gradients
from treering import ranks
from treering.model.context import tree_attention
from treering.model.three_pass import ThreePassScores, backward_of
from treering.model.tree_model import TreeModel
from treering.objectives import sft
from treering.ranks import group as group_module
from treering.ranks.group import RankGroup
from treering.train import memory
from treering.train.loop.compute import precision, shard_model
from treering.train.memory import bytes_per_token
from treering.train.step import backward as measuring_backward
from treering.tree.forest import Forest


def backward(*args: Any, **options: Any) -> Any:
    """Run a step that keeps partitions, because measuring memory takes extra forwards."""
    with forced("keep"):
        return measuring_backward(*args, **options)


class Recording(TorchDispatchMode):
    """Dispatch mode that records calls of torch.distributed: each name, and each tensor's dtype, device and size."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            tensors: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, args)
            facts = [[str(one.dtype), one.device.type, one.numel()] for one in tensors]
            self.calls.append([func._schema.name.split("::")[1], facts])
        return func(*args, **(kwargs or {}))


def recorded(model: nn.Module, mode: Any, rank: int) -> list[list[Any]]:
    with Recording() as recording:
        backward(model, Forest.from_sequences(tree(rank)), sft(), ranks=mode)
    return recording.calls


def error_in_three_passes(mode: Any, rank: int) -> float:
    """Return the error of gradients whose logits kernels compute once, against one process without kernels."""
    trees = [Forest.from_sequences(tree(number)) for number in range(dist.get_world_size())]
    single, model = build(), build()
    backward(single, trees, sft(), ranks="alone")
    shard_model(model, "none")
    with ExitStack() as stack:
        for name, value in (("has_kernels", lambda _: True), ("rows_at_once", lambda *_: 2)):
            stack.enter_context(mock.patch(f"treering.model.edges.{name}", value))
        # Its backward would compute logits again.
        stack.enter_context(mock.patch.object(ThreePassScores, "backward", None))
        backward(model, trees[rank], sft(), ranks=mode)
    return error_of(gradients(model), gradients(single))


def sums_of_whole_models(rank: int, num_bytes: int) -> dict[str, Any]:
    """Run two steps of ranks that run one forward, whole and partitioned trees, or nothing.

    Return whether their sums have the bits of summing each weight separately, and the order of backwards and sums in a
    step.
    """
    shares = (([0], None), ([1, 2, 3], 7), ([], None))
    single, model = build(), build()
    ranks.prepare(model)
    expected = {name: torch.zeros_like(weight) for name, weight in single.named_parameters()}
    begin_sum, steps = RankGroup.begin_sum, []
    for number in range(len(shares) - 1):
        trees, max_tokens = shares[number + rank]
        forests = [Forest.from_sequences(tree(one)) for one in trees]
        single.zero_grad()
        backward(single, forests, sft(normalizer="sum"), max_tokens, ranks="alone")
        for name, weight in single.named_parameters():
            own = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            dist.all_reduce(own)
            expected[name] += own
        steps.append([])

        def begun(self: RankGroup, bucket: list[torch.Tensor], events: list[str] = steps[-1]) -> Any:
            events.append("sum")
            return begin_sum(self, bucket)

        def noted(loss: torch.Tensor, events: list[str] = steps[-1]) -> None:
            events.append("begin")
            backward_of(loss)
            events.append("end")

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(RankGroup, "begin_sum", begun))
            stack.enter_context(mock.patch.object(group_module, "BUCKET_BYTES", num_bytes))
            for module in ("step", "partitioned"):
                stack.enter_context(mock.patch(f"treering.train.{module}.backward_of", noted))
            stack.enter_context(forced("keep"))
            backward(model, forests, sft(normalizer="sum"), max_tokens)
    same = all(torch.equal(weight.grad, expected[name]) for name, weight in model.named_parameters())
    return {"same bits": same, "steps": steps}


def fewest_tokens(mode: Any, rank: int) -> list[Any]:
    """Return the fewest tokens that ranks with room for 40 and 7 tokens plan by, and the error against one process."""
    trees = [Forest.from_sequences(tree(number)) for number in range(dist.get_world_size())]
    single, model = build(), build()
    backward(single, trees, sft(), ranks="alone")
    if mode != "whole":
        shard_model(model, "none")
    ranks.prepare(model)
    mode = "gathered" if mode == "whole" else mode

    with tree_attention(single):
        num_bytes = bytes_per_token(TreeModel.of(single))

    def measured(parts: Any, weights: Any, mode: Any) -> int:
        # Every rank runs the forwards that measure, which gather weights.
        assert memory._measured(parts, weights, mode) >= memory.LEAST_TOKENS
        # A weight that is counted in only one of the two forwards would be hundreds of bytes a token.
        assert abs(bytes_per_token(parts) - num_bytes) < 10
        return (40, 7)[rank]

    with mock.patch("treering.train.step.tokens_that_fit", measured), forced("keep"):
        result = backward(model, trees[rank], sft(), "auto", ranks=mode)
    return [result.plan.max_tokens, error_of(gradients(model), gradients(single))]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for mode in ("sharded", "gathered"):
        model: nn.Module = build()
        shard_model(model, "none")
        found[mode] = recorded(model, mode, rank)
    model = build()
    rank_group = ranks.prepare(model)
    found["whole"] = recorded(model, "gathered", rank)
    found["num_weights"] = sum(1 for _ in model.parameters())
    for name, dtype, autocast in (("autocast", torch.float32, "bfloat16"), ("16 bits", torch.bfloat16, "none")):
        model = build().to(dtype)
        shard_model(model, autocast)  # type: ignore[arg-type]
        with precision(model, autocast):  # type: ignore[arg-type]
            found[name] = recorded(model, "sharded", rank)
    found["three passes"] = {mode: error_in_three_passes(mode, rank) for mode in ("sharded", "gathered")}
    found["overlap"] = {str(num_bytes): sums_of_whole_models(rank, num_bytes) for num_bytes in (1, 10_000, 10**9)}
    found["fewest tokens"] = {mode: fewest_tokens(mode, rank) for mode in ("sharded", "gathered", "whole")}
    with Recording() as recording:
        rank_group.sum(np.ones(3))
        rank_group.gather("fact")
    found["facts"] = recording.calls
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    del model
    # See `treering.cli.ranks.joined`.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
