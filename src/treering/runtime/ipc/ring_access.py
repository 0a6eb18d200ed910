"""What a local process needs to read and write the ring of weights. Imports no torch when it loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treering.runtime.ipc.shared_memory import SharedMemory

if TYPE_CHECKING:
    from torch import nn

    from treering.runtime.ipc.child import Port
    from treering.runtime.ipc.weight_store import ProcessWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RingAccess:
    """The memory of a ring and its number of slots; pickled only as an argument of a new process."""

    memory: SharedMemory
    num_slots: int
    host: str = "127.0.0.1"

    def open(self, model: nn.Module, port: Port) -> ProcessWeights:
        """The ring, for a process that has built the model.

        Raises:
            StateError: the model is another than the controller's.
        """
        from treering.runtime.ipc.weight_ring import WeightRing

        return WeightRing(model, self.num_slots, self.memory)
