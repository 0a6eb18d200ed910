"""Watch memory without a clock or an allocator: record the largest tensor that any operation returns."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor):
                self.num_entries = max(self.num_entries, tensor.numel())
        return out
