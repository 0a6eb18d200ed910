"""A CPU for verl, which knows CUDA, ROCm and NPU devices: with it verl's FSDP engine runs over gloo."""

from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


class _NoMemory:
    """What verl logs of a device's memory, and torch's CPU does not tell."""

    @staticmethod
    def max_memory_allocated() -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    @staticmethod
    def is_available() -> bool:
        """No, or verl would look for memory to empty."""
        return False

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name() -> str:
        return "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _NoMemory()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def cudart(self) -> None: ...

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
