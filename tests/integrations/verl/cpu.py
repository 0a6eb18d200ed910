"""A CPU device for verl, which supports CUDA, ROCm and NPU devices; with it verl's FSDP engine runs over gloo."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


class _NoMemory:
    """Stand-in for the device-memory figures that verl logs, which torch has none of on CPU."""

    @staticmethod
    def max_memory_allocated() -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    @staticmethod
    def is_available() -> bool:
        """Return False, or verl would try to empty device memory."""
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


def _answering(value: Any) -> Callable[..., Any]:
    return lambda self, *_, **__: value


_ANSWERS = {
    "is_available": True,
    "current_device": torch.device("cpu"),
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "NO_DEVICES",
    "nvtx_range": nullcontext(),
    "ray_resource_name": "GPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
}
_METHODS = {name: _answering(_ANSWERS.get(name)) for name in {*_ANSWERS, *PlatformBase.__abstractmethods__}}
_SEEDS = dict.fromkeys(("manual_seed", "manual_seed_all"), lambda self, seed: torch.manual_seed(seed))
_FIELDS = {"device_name": "cpu", "vendor_name": "none", "device_module": _NoMemory()}

CpuPlatform = type("CpuPlatform", (PlatformBase,), {**_METHODS, **_SEEDS, **_FIELDS})
