"""Run `treering cache`: list the cached tokens of trajectory and prompt files, or remove them."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from treering.cli.display import PlainConsole
from treering.cli.options import JsonOutput
from treering.data.cache.folder import CacheEntry, cache_folder, clear, entries


def cache(
    clears: Annotated[bool, typer.Option("--clear", help="Remove all caches.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """List or remove the cached tokens of files, with which the next `inspect`, `sft` or `train` starts at once.

    Caches are in TREERING_CACHE, else in treering of XDG_CACHE_HOME or ~/.cache. A changed file, tokenizer, template or
    setting makes a new cache; old ones stay until they are cleared.

    Example: treering cache --clear
    """
    folder = cache_folder()
    found = entries(folder)
    num_freed = clear(folder) if clears else 0
    if json_output:
        print(_as_json(folder, found, num_freed if clears else None))
        return
    console = PlainConsole(highlight=False)
    if clears:
        console.print(f"removed {_count(found)} from {folder}, {num_freed / 1e6:,.1f} MB", soft_wrap=True)
        return
    if found:
        console.print(_table(found))
    total = sum(entry.num_bytes for entry in found) / 1e6
    console.print(f"{_count(found)} in {folder}, {total:,.1f} MB", soft_wrap=True)


def _count(found: Sequence[CacheEntry]) -> str:
    return f"{len(found):,} cache{'' if len(found) == 1 else 's'}"


def _as_json(folder: Path, found: Sequence[CacheEntry], num_freed: int | None) -> str:
    rows = [
        {"name": entry.folder.name, "file": entry.source, "num_bytes": entry.num_bytes, "made": entry.made}
        for entry in found
    ]
    freed = {} if num_freed is None else {"num_bytes_freed": num_freed}
    return json.dumps({"folder": str(folder), "caches": rows, **freed}, indent=2)


def _table(found: Sequence[CacheEntry]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("file, as it was named", overflow="fold")
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("made", no_wrap=True)
    for entry in found:
        made = datetime.fromtimestamp(entry.made).isoformat(" ", "minutes")
        table.add_row(entry.source or "(unreadable)", f"{entry.num_bytes / 1e6:,.1f}", made)
    return table
