"""Resolves `treering[train]` next to each host of `hosts.toml`, downloads metadata only, and prints a table.

A conflict that hosts.toml does not list fails, and so does a listed one that is none any more. The versions of torch
and transformers are those that pip would install for both. Run it with `make hosts`.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
NUM_AT_ONCE = 4
COLUMNS = ("host", "version", "torch", "transformers", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A project to resolve with Treering."""

    name: str
    """Name in a requirement, extras included."""
    version: str
    conflict: str | None = None
    """Why it is known not to resolve; None where it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the resolver says: exact versions by package, or why there are none."""

    versions: dict[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table, and whether it is as hosts.toml says."""

    cells: tuple[str, ...]
    is_expected: bool
    error: str = ""


Resolve = Callable[[str], Resolved]


def judge(host: Host, resolve: Resolve, *, newest: bool = False) -> Row:
    """The row of one host; `newest` first asks which release of it the index has.

    It asks without extras: a release whose extra does not resolve would give way to an ancient one.

    Example: a host without a `conflict` that does not resolve gives a row with the result "CONFLICT".
    """
    package = host.name.partition("[")[0]
    version = resolve(f"only {package}").versions.get(package, host.version) if newest else host.version
    found = resolve(f"{host.name}=={version}")
    known, failed = host.conflict is not None, bool(found.error)
    result = {
        (False, False): "resolves",
        (True, True): f"known conflict: {host.conflict}",
        (False, True): "CONFLICT",
        (True, False): "resolves, but is listed as a conflict",
    }[known, failed]
    cells = (host.name, version, *(found.versions.get(name, "-") for name in ("torch", "transformers")), result)
    return Row(cells=cells, is_expected=known == failed, error="" if known else found.error)


def read_hosts(table: Path = TABLE) -> tuple[list[Host], list[str]]:
    """The hosts of the table, and the resolver's options for its Python and platform."""
    content = tomllib.loads(table.read_text(encoding="utf-8"))
    options = ["--python-version", content["python"], "--python-platform", content["platform"]]
    return [Host(**entry) for entry in content["hosts"]], options


def resolver(uv: str, options: Sequence[str]) -> Resolve:
    """Resolves a requirement with `treering[train]` with uv; one that starts with "only " by itself."""

    def resolve(requirement: str) -> Resolved:
        alone = requirement.startswith("only ")
        sources = ["-"] if alone else ["pyproject.toml", "-", "--extra", "train"]
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options, *sources]
        done = subprocess.run(
            command, input=requirement.removeprefix("only "), capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode:
            return Resolved(versions={}, error=done.stderr.strip())
        pins = (line.split(";")[0].split("==") for line in done.stdout.splitlines() if "==" in line)
        return Resolved(versions={name.strip(): version.strip() for name, version in pins})

    return resolve


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows under COLUMNS as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, then what uv says of every unexpected conflict; 0 if all rows are as listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--newest", action="store_true", help="the newest release of each host, not the listed one")
    parser.add_argument("names", nargs="*", help="only these hosts")
    options = parser.parse_args(arguments)
    hosts, resolver_options = read_hosts()
    chosen = [host for host in hosts if host.name.partition("[")[0] in options.names or not options.names]
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    resolve = resolver(uv, resolver_options)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        rows = list(pool.map(lambda host: judge(host, resolve, newest=options.newest), chosen))
    print(as_table([row.cells for row in rows]))
    for row in rows:
        if row.error:
            print(f"\n{row.cells[0]} {row.cells[1]}:\n{row.error}", file=sys.stderr)
    return 0 if all(row.is_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
