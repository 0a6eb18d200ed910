"""Run by every rank: a step that would be wrong silently, or hang, raises one error by name on every rank."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.image_models import build as build_with_images
from tests.models import build_float64
from tests.partitions import forced
from tests.ranks.batches import tree
from tests.ranks.wraps import shard_apart, shard_layers
from treering import ranks
from treering.engine.torch_engine import TorchEngine
from treering.model.forward import forward
from treering.model.patch import patch
from treering.model.teacher import score
from treering.objectives import Objective, dapo, distill, dpo, ppo, sft
from treering.train.step import backward as measuring_backward
from treering.tree.forest import Forest


def backward(*args: Any, **options: Any) -> Any:
    """Run a step that keeps partitions, because measuring memory takes extra forwards."""
    with forced("keep"):
        return measuring_backward(*args, **options)


FOREST = Forest.from_sequences(tree(0))


def run_guards(num_ranks: int, rank: int) -> dict[str, list[str] | None]:
    """Return the type and message of each guard's error, by name; None where nothing was raised."""
    found = {}
    for name, act in guards(num_ranks, rank):
        try:
            act()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        else:
            found[name] = None
    return found


def guards(num_ranks: int, rank: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "not prepared", lambda: step(shard_layers(build_float64()))
    yield "DDP not prepared", lambda: step(DistributedDataParallel(build_float64()))
    yield "module of DDP not prepared", lambda: step(DistributedDataParallel(build_float64()).module)
    # Modules that are sharded after `prepare` average.
    yield "averaging kept", lambda: step(shard_layers(prepared(build_float64())))
    yield "a factor of its own", lambda: step(with_factor(prepared(), 2.0))
    yield "tied apart", lambda: step(prepared(shard_apart(build_float64(tie_word_embeddings=True))))
    yield "all are cut", lambda: step(prepared(), [tree(0, num_branches=3 + rank, depth=5)], max_tokens=7)
    pair = dpo([(0, 1)], [[1] * 4] * 2)
    yield (
        "sequences are apart",
        lambda: step(prepared(), [[[1, 2, 3, 4]], [[5, 6, 7, 8]]], objective=pair, max_tokens=6),
    )
    yield "one is cut", lambda: step(prepared(), [tree(0, depth=2 + 4 * rank)], max_tokens=9)
    yield "other objective", lambda: step(prepared(), objective=dapo([1.0] * 3, [[1] * 6] * 3) if rank else sft())
    yield "one refuses", lambda: step(prepared(), [[[1, 2, 99 if rank == 1 else 3]]])
    alike = [(np.full((6, 1), 3), np.full((6, 1), -1.0 - rank * number)) for number in range(3)]
    yield "one teacher differs", lambda: step(prepared(build_float64()), objective=distill(alike))
    yield "other mode", lambda: step(prepared(), ranks="sharded" if rank else "gathered")
    yield "whole but sharded", lambda: step(prepared(build_float64()), ranks="sharded")
    yield "sharded but alone", lambda: step(prepared(), ranks="alone")
    yield "unknown mode", lambda: step(prepared(), ranks="both")
    yield "FSDP1", lambda: step(fsdp1())
    yield "FSDP1 prepared", lambda: ranks.prepare(fsdp1())
    yield "tensor parallel", lambda: step(tensor_parallel(build_float64(), num_ranks))
    yield "tensor parallel prepared", lambda: ranks.prepare(tensor_parallel(build_float64(), num_ranks))
    yield "context parallel", lambda: in_context_parallel(num_ranks)
    yield "DeepSpeed", lambda: ranks.prepare(deepspeed_engine(build_float64()))
    yield "submesh", lambda: ranks.prepare(shard_layers(build_float64(), mesh=submesh(num_ranks)))
    value_head = fully_shard(nn.Linear(32, 1).double())
    yield "sharded value head", lambda: step(prepared(), objective=with_values(), value_head=value_head)
    yield "sharded teacher", lambda: step(prepared(), objective=distill(prepared()))
    yield "scored by a sharded teacher", lambda: score(prepared(), FOREST)
    yield "sharded images", lambda: step(prepared(shard_layers(build_with_images("qwen2_5_vl"))))
    yield "sharded engine", lambda: TorchEngine(prepared(), max_batch=2, max_tokens=64, seed=0)
    yield "forward of DDP", lambda: forward(DistributedDataParallel(build_float64()), FOREST)
    yield "forward under ZeRO-3", lambda: forward(partitioned(build_float64()), FOREST)
    yield "patch under ZeRO-3", lambda: patch(partitioned(build_float64()))
    yield "alone", lambda: step(build_float64(), ranks="alone")
    yield "forward", lambda: forward_is_that_of_one(num_ranks, rank)
    # On CPU one process would cut it at 2,048 tokens.
    large = tree(rank, num_branches=2, depth=800 if rank == 0 else 2)
    yield "a large tree in step", lambda: step(prepared(), [large], max_tokens=4096, ranks="sharded")
    yield "goes on after an error", lambda: goes_on(rank)
    yield "a value head of the model", value_head_inside


def step(
    model: nn.Module, groups: Any = None, *, objective: Any = None, max_tokens: Any = None, **options: Any
) -> None:
    forests = [Forest.from_sequences(group) for group in groups or [tree(0)]]
    backward(model, forests, objective or sft(), max_tokens, **options)


def prepared(model: Any = None) -> nn.Module:
    model = shard_layers(build_float64()) if model is None else model
    ranks.prepare(model)
    return model  # type: ignore[no-any-return]


def with_factor(model: Any, factor: float) -> nn.Module:
    model.set_gradient_divide_factor(factor)
    return model  # type: ignore[no-any-return]


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(build_float64(), device_id=torch.device("cpu"))


def tensor_parallel(model: Any, num_ranks: int) -> nn.Module:
    plan = {f"model.layers.{i}.mlp.up_proj": ColwiseParallel() for i in range(2)}
    return parallelize_module(model, init_device_mesh("cpu", (num_ranks,)), plan)


def in_context_parallel(num_ranks: int) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    mesh, buffer = init_device_mesh("cpu", (num_ranks,)), torch.zeros(1, 2 * num_ranks)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        step(build_float64(), ranks="alone")


def deepspeed_engine(model: nn.Module) -> nn.Module:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    engine.module = model
    return engine  # type: ignore[no-any-return]


def partitioned(model: nn.Module) -> nn.Module:
    """Return a model whose weights have the marks of ZeRO-3, which stay on weights that are not gathered."""
    for number, weight in enumerate(model.parameters()):
        weight.ds_id, weight.ds_shape = number, weight.shape  # type: ignore[attr-defined]
    return model


def submesh(num_ranks: int) -> Any:
    return init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("a", "b"))["a"]


def forward_is_that_of_one(num_ranks: int, rank: int) -> None:
    """Check a forward in which each rank has its own forest; the last one's is empty."""
    plain = build_float64()
    model = prepared(fully_shard(copy.deepcopy(plain)))
    forest = Forest.from_sequences(tree(rank)) if rank + 1 < num_ranks else Forest.from_sequences([])
    with torch.no_grad():
        assert torch.equal(forward(model, forest).logprobs, forward(plain, forest).logprobs)
    wanted = None if rank else [False] * forest.num_tokens
    total = forward(model, forest, wanted=wanted).logprobs.sum()
    total.backward()  # type: ignore[no-untyped-call]


def with_values() -> Objective:
    ones = [[1.0] * len(sequence) for sequence in tree(0)]
    return ppo(ones, ones, [[0.0] * len(each) for each in ones], returns=ones)


def value_head_inside() -> None:
    """Check that a value head inside the model is summed over ranks once, like a separate one."""
    found = []
    for is_inside in (False, True):
        model, head = build_float64(), nn.Linear(32, 1).double()
        nn.init.ones_(head.weight), nn.init.ones_(head.bias)
        if is_inside:
            model.value_head = head
        for _ in range(2):
            step(prepared(model), objective=with_values(), value_head=head)
        found.append([weight.grad for weight in head.parameters()])
    assert all(map(torch.equal, *found))


def goes_on(rank: int) -> None:
    """Check that a step that failed on all ranks leaves nothing in the next one's gradients."""
    for mode in ("gathered", "sharded"):
        goes_on_in(mode, rank)


def goes_on_in(mode: str, rank: int) -> None:
    model: Any = prepared()
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    step(model, [tree(rank)], ranks=mode)
    before = [weight.grad.full_tensor().clone() for weight in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        model.model.norm.weight.div_(2.0)
    handle = model.model.norm.register_forward_hook(fail)
    try:
        step(model, [tree(rank)], ranks=mode)
    except ZeroDivisionError:
        handle.remove()
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    step(model, [tree(rank)], ranks=mode)
    for weight, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight.grad.full_tensor(), gradient)
    dist.barrier()


def fail(*_: object) -> None:
    raise ZeroDivisionError
