"""Run `treering cache`: list the cached tokens of trajectory and prompt files, or remove them."""

import json
from datetime import datetime
from typing import Annotated

import typer

from treering.cli.display import PlainConsole, figures_table
from treering.cli.options import JsonOutput
from treering.data.cache.folder import cache_folder, clear, entries
from treering.errors import plural


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
    freed = {"num_bytes_freed": clear(folder)} if clears else {}
    if json_output:
        rows = [
            {"name": entry.folder.name, "file": entry.source, "num_bytes": entry.num_bytes, "made": entry.made}
            for entry in found
        ]
        print(json.dumps({"folder": str(folder), "caches": rows, **freed}, indent=2))
        return
    console, count = PlainConsole(), plural(len(found), "cache")
    if clears:
        console.print(f"removed {count} from {folder}, {freed['num_bytes_freed'] / 1e6:,.1f} MB")
        return
    if found:
        table = figures_table(None, ("file, as it was named", "MB", "made"))
        table.columns[0].no_wrap = False
        for entry in found:
            made = datetime.fromtimestamp(entry.made).isoformat(" ", "minutes")
            table.add_row(entry.source or "(unreadable)", f"{entry.num_bytes / 1e6:,.1f}", made)
        console.print(table)
    total = sum(entry.num_bytes for entry in found) / 1e6
    console.print(f"{count} in {folder}, {total:,.1f} MB")
