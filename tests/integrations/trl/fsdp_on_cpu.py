"""FSDP2 by Accelerate on gloo: Accelerate shards models on devices only, and what follows it does as it does there."""

from typing import Any

import accelerate.accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule


def emulate() -> None:
    """Makes Accelerate take processes on CPU for those of devices, in this process from now on."""
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
                # Gloo has no operation that averages: it sums, and the division follows.
                unit.set_force_sum_reduction_for_comms(True)
        return sharded

    AcceleratorState.__init__ = state
    accelerate.accelerator.fsdp2_prepare_model = prepare
