"""Claim: a data set of any size is read in bounded memory, and a second start reads none of its text.

ToolBench's conversations are repeated, each time as other tasks with another first message, to a file of some size: as
messages, or as the ids of their tokens. On it run `treering inspect`, the same again, and `treering sft` to its first
step, each in its own process. Seconds are of the processors, with those of the processes that it starts.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.tiny_model import TINY_MODEL
from treering.data import Trajectory, data_folder, read_trajectories, render
from treering.errors import InputError

NOTE = "a minute for 13 MB, and some ten for 1.3 GB of text on quiet cores; `--only '13 MB'` takes one file"
TABLES = {"files": ("file", "num_tokens", "commands")}

ROOT = Path(__file__).parents[2]
FILES: Mapping[str, tuple[float, bool]] = MappingProxyType(
    {"13 MB": (13e6, False), "134 MB": (134e6, False), "1.3 GB of ids": (1.3e9, True), "1.3 GB": (1.3e9, False)}
)
"""Bytes, and whether they hold ids."""
CONFIG = """
[model]{model}[data]
files = ["{file}"]
tokenizer = "{tokenizer}"
template = "plain"
[train]
num_steps = 1
trees_per_step = 1
[run]
dir = "{run}"
"""


def measure(*, only: Sequence[str] = tuple(FILES), on_progress: OnProgress = silent) -> dict[str, Any]:
    """The report: "files" with the tokens of each, and seconds and peak memory of each command.

    Raises:
        InputError: an unknown file, or no real data.
    """
    source = data_folder()
    if source is None or not set(only) <= set(FILES):
        raise InputError(f"files are {', '.join(FILES)}, made of TREERING_DATA; got {', '.join(only)} and {source}")
    found = []
    for number, name in enumerate(only):
        with TemporaryDirectory() as folder:
            on_progress(f"writing {name}", number / len(only))
            num_bytes, is_ids = FILES[name]
            file = Path(folder, "set.jsonl")
            _write(file, source, num_bytes, is_ids=is_ids)
            commands = _measured(file, source, on_progress, number / len(only))
            [tokens] = Path(folder).rglob("tokens.npy")
            num_tokens = int(np.load(tokens, mmap_mode="r").size)
            size = file.stat().st_size
        found.append({"file": name, "num_bytes": size, "num_tokens": num_tokens, "commands": commands})
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {"commit": commit.stdout.strip(), "files": found}


def _measured(file: Path, source: Path, on_progress: OnProgress, done: float) -> dict[str, Any]:
    tokenizer = source / "tokenizer"
    config = file.with_name("run.toml")
    config.write_text(CONFIG.format(model=TINY_MODEL, file=file, tokenizer=tokenizer, run=file.with_name("run")))
    inspect = ["inspect", str(file), "--tokenizer", str(tokenizer), "--template", "plain", "--json"]
    commands = {"inspect": inspect, "inspect again": inspect, "sft to its first step": ["sft", str(config)]}
    found = {}
    for name, arguments in commands.items():
        on_progress(f"{name} of {file.stat().st_size / 1e6:.0f} MB", done)
        found[name] = _run(arguments, file.parent)
    return found


def _run(arguments: Sequence[str], folder: Path) -> dict[str, float]:
    environment = os.environ | {"TREERING_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "treering", *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=stream
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"treering {arguments[0]} ended with {process.returncode}: {log.read_text()[-500:]}")
    return {"seconds": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1024}


def _write(file: Path, source: Path, num_bytes: float, *, is_ids: bool) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for record in _records(source, is_ids=is_ids):
            stream.write(json.dumps(record) + "\n")
            if stream.tell() >= num_bytes:
                return


def _records(source: Path, *, is_ids: bool) -> Iterator[dict[str, Any]]:
    path = source / "bench" / "toolbench_dfsdt.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        records = [json.loads(line) for line in stream]
    trajectories: list[Trajectory] = list(read_trajectories(path)) if is_ids else []
    rendered = render(trajectories, source / "tokenizer", "plain") if is_ids else []
    cycle = 0
    while True:
        cycle += 1
        for one in rendered:
            mask = one.loss_mask.astype(int).tolist()
            yield {
                "task_id": f"{cycle} {one.task_id}",
                "tokens": [cycle, *one.tokens.tolist()],
                "loss_mask": [0, *mask],
            }
        for record in () if is_ids else records:
            first, *others = record["messages"]
            messages = [{**first, "content": f"{cycle} {first['content']}"}, *others]
            yield {**record, "task_id": f"{cycle} {record['task_id']}", "messages": messages}
