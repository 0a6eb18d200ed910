"""FSDP2 and DeepSpeed by Accelerate on gloo.

Accelerate uses them only on devices; all later steps run as they do there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.accelerator
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule


def emulate(kind: str) -> None:
    """Make Accelerate treat processes on CPU as processes on devices, for the rest of this process."""
    if kind == "fsdp":
        _emulate_fsdp()
    if kind == "zero":
        import deepspeed

        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
        # It would compile its own collectives.
        deepspeed.ops.__dict__["__compatible_ops__"] = {}


def _emulate_fsdp() -> None:
    stock_state, stock_prepare = AcceleratorState.__init__, accelerate.accelerator.fsdp2_prepare_model

    def state(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        stock_state(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is None:
            return
        if fsdp_plugin.cpu_offload:
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    def prepare(accelerator: Any, model: nn.Module) -> nn.Module:
        sharded = stock_prepare(accelerator, model)
        for unit in sharded.modules():
            if isinstance(unit, FSDPModule):
                # Gloo cannot average: it sums, and the division follows.
                unit.set_force_sum_reduction_for_comms(True)
        return sharded

    AcceleratorState.__init__ = state
    accelerate.accelerator.fsdp2_prepare_model = prepare


@contextmanager
def gradients_of_deepspeed() -> Iterator[list[dict[str, torch.Tensor]]]:
    """Inside the block, keep the whole gradients of each step."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    gradients: list[dict[str, torch.Tensor]] = []
    stock = deepspeed.DeepSpeedEngine.step

    def step(engine: Any, *args: Any, **kwargs: Any) -> None:
        weights = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        gradients.append({n: safe_get_full_grad(p).clone() for n, p in weights})
        stock(engine, *args, **kwargs)

    deepspeed.DeepSpeedEngine.step = step
    try:
        yield gradients
    finally:
        deepspeed.DeepSpeedEngine.step = stock


def weights_of_deepspeed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of each weight, gathered."""
    import deepspeed

    weights = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        return {name: weight.detach().clone() for name, weight in weights.items()}
