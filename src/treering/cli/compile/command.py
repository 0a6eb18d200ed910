"""Runs `treering compile`: part by part, with the seconds that each took."""

import json
import time

from rich.console import Console

from treering.cli.compile.parts import parts


def run(json_output: bool) -> int:
    """Compiles what numba compiles into its cache on disk, so that no later process does; returns 0.

    Args:
        json_output: the seconds of processor time by part as one JSON object, instead of lines.
    """
    console, seconds = Console(stderr=True), {}
    for name, compile_part in parts().items():
        start = time.process_time()
        with console.status(f"compiling {name}"):
            compile_part()
        seconds[name] = round(time.process_time() - start, 2)
        if not json_output:
            print(f"{name}: {seconds[name]:.1f} s of a processor")
    if json_output:
        print(json.dumps({"seconds": seconds}))
    return 0
