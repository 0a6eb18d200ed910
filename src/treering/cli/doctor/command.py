"""Runs `treering doctor`: collects the reports, and prints tables or JSON."""

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from treering.cli.doctor.installation import Machine, Package, find_packages, read_machine
from treering.extras import TRAIN, is_installed, require

EXIT_FAULT = 1


def run(folder: Path | None, json_output: bool) -> int:
    """Prints the packages, the checks of all backends, the defaults with their reasons, and the state of a run folder.

    Args:
        folder: of a run; None for the installation alone.
        json_output: JSON instead of tables.

    Returns:
        0, or 1 if a backend is wrong here or a file of the run is damaged.

    Raises:
        InputError: no folder of a run.
        MissingExtraError: a run is to be checked, and torch is missing.
    """
    if folder is not None:
        require("treering doctor RUN")
    report: dict[str, Any] = {"packages": find_packages(), "machine": read_machine()}
    if all(map(is_installed, TRAIN)):
        report |= _backends()
        report |= {} if folder is None else _run(folder)
    print(json.dumps(report, indent=2, default=_plain)) if json_output else _print(report, Console())
    return EXIT_FAULT if _has_fault(report) else 0


def _backends() -> dict[str, Any]:
    from treering.cli.doctor.backends import find_choice, find_shapes, try_backends

    shapes = find_shapes()
    with Console(stderr=True).status("checking every backend; on a GPU each is compiled first, which takes minutes"):
        tried = [found for shape in shapes for found in try_backends(shape)]
        return {"backends": tried, "choices": [find_choice(shape) for shape in shapes]}


def _run(folder: Path) -> dict[str, Any]:
    from treering.cli.doctor.mismatch import measure_mismatch
    from treering.cli.doctor.run_folder import check_run

    run = check_run(folder)
    return {"run": run, "mismatch": measure_mismatch(folder, run.checkpoints)}


def _has_fault(report: dict[str, Any]) -> bool:
    has_wrong_backend = any(found.has_passed is False for found in report.get("backends", ()))
    return has_wrong_backend or ("run" in report and not report["run"].is_whole)


def _plain(value: Any) -> Any:
    """What JSON has no form for: the name of a path, the fields of a record, a mapping that is no dict."""
    if isinstance(value, Path):
        return value.name
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return dict(value)


def _print(report: dict[str, Any], console: Console) -> None:
    console.print(_packages_table(report["packages"]))
    _print_machine(report["machine"], console)
    if "backends" not in report:
        console.print("attention and engine: not checked, since torch is missing: pip install 'treering[train]'")
        return
    console.print(_backends_table(report["backends"]))
    for choice in report["choices"]:
        words = f"{choice.device} in {choice.dtype}: attention {choice.attention}; engine {choice.engine}"
        console.print(words, soft_wrap=True, markup=False)
    if "run" in report:
        _print_run(report, console)


def _packages_table(packages: list[Package]) -> Table:
    table = _table("Packages", "package", "installed", "tested with", "")
    for package in packages:
        words = {None: "", True: "supported", False: "[yellow]not a tested release[/yellow]"}[package.is_supported]
        if package.installed is None:
            words = "host, not installed" if package.is_host else "not installed"
        table.add_row(package.name, package.installed or "-", package.needed or "any", words)
    return table


def _print_machine(machine: Machine, console: Console) -> None:
    threads = "" if machine.num_threads is None else f", {machine.num_threads} torch threads"
    free = "" if machine.free_bytes is None else f", {machine.free_bytes / 2**30:.1f} GiB of memory free"
    console.print(f"{machine.system}; {machine.num_cores} cores{threads}{free}")
    for name, (free_bytes, total_bytes) in machine.devices.items():
        console.print(f"{name}: {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free")
    for name, value in machine.settings.items():
        console.print(f"{name}={value}")
    for advice in machine.advice:
        console.print(f"[yellow]{advice}[/yellow]")


def _backends_table(backends: list[Any]) -> Table:
    table = _table("Attention backends, beside the reference", "device", "dtype", "backend", "", "error", "limit", "")
    verdicts = {True: "passed", False: "[red]wrong[/red]", None: "refused"}
    for found in backends:
        numbers = ("-", "-") if found.error is None else (f"{found.error:.1e}", f"{found.tolerance:.1e}")
        verdict = verdicts[found.has_passed]
        # Of a refusal, the reason; what to do instead is in the JSON.
        words = re.split(": choose|; to test", found.words)[0] if found.has_passed is None else found.words
        table.add_row(found.device, found.dtype, found.backend, verdict, *numbers, words)
    return table


def _print_run(report: dict[str, Any], console: Console) -> None:
    run, mismatch = report["run"], report["mismatch"]
    table = _table("Run folder", "file", "", "holds")
    for file in run.files:
        table.add_row(file.name, "whole" if file.damage is None else "[red]damaged[/red]", file.damage or file.words)
    console.print(table)
    console.print(f"when it is started again: {run.resume}", soft_wrap=True, markup=False)
    if not mismatch.bins:
        console.print(f"train-inference mismatch: not measured: {mismatch.words}", soft_wrap=True)
        return
    table = _table(f"Train-inference mismatch: {mismatch.words}", "sampled tokens before", "tokens", "mean", "largest")
    for found in mismatch.bins:
        table.add_row(f"{found.first:,} or more", f"{found.num_tokens:,}", f"{found.mean:.1e}", f"{found.largest:.1e}")
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
