"""Data files that are large, change or meet a fault while `treering inspect` reads them.

Each ends with the figures of the whole file, or with one clear line; sizes are a fiftieth of those of the full form.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.faults.cases import Case, Kind, small_disk
from benchmarks.faults.judge import Verdict, failure, judge_refusal, trouble_of
from benchmarks.faults.runs import ROOT, Ended, is_left
from benchmarks.faults.task import save_tokenizer

_ENOUGH = 8_500_000
"""Bytes from which processes render."""
_MEMORY = 4 << 30
_LIMIT_S = 3600.0


def _on_a_full_disk(case: Case, variable: str) -> Verdict:
    """The folder of the cache, or that of temporary files, is full."""
    file = _write(case.folder / "set.jsonl", _tasks(20_000))
    with small_disk(case.folder / "disk", f"size={case.random.randrange(2, 40) * 4096}"):
        return _read(case, file, {variable: str(case.folder / "disk")}, num_tasks=20_000)


def _on_a_read_only_disk(case: Case) -> Verdict:
    file = _write(case.folder / "set.jsonl", _tasks(2000))
    with small_disk(case.folder / "disk", "size=65536,ro"):
        return _read(case, file, {"TREERING_CACHE": str(case.folder / "disk")}, num_tasks=2000)


def _changes(case: Case, change: Callable[[Path], None]) -> Verdict:
    """Another process changes the file at a random moment; nothing of that is kept under the old content."""
    lines = _tasks(20_000)
    file = _write(case.folder / "set.jsonl", lines)
    timer = threading.Timer(case.random.uniform(0.2, 2.0), change, [file])
    timer.start()
    ended, out = _inspect(case, file)
    timer.join()
    if (trouble := trouble_of(case.run, ended)) is not None:
        return failure(trouble)
    if ended.code == 0 and out["tasks"] != 20_000:
        return failure(f"{out['tasks']} of 20,000 tasks were read without a word")
    if ended.code and (verdict := judge_refusal(ended)).ending == "failure":
        return verdict
    _write(file, lines)
    again = _read(case, file, {}, num_tasks=20_000)
    return again if ended.code == 0 or again.ending == "failure" else judge_refusal(ended)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _overwrite(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"[1, ", b"[5, "))


def _worker_is_killed(case: Case) -> Verdict:
    """One of the processes that render is killed."""
    said = {"role": "user", "content": "a b c " * 200}, {"role": "assistant", "content": "b"}
    line = json.dumps({"task_id": "t", "messages": said, "format": "raw"}) + "\n"
    file = _write(case.folder / "set.jsonl", [line] * (_ENOUGH // len(line) + 1))
    save_tokenizer(case.folder, ["a", "b", "c"])
    ended, _ = _inspect(case, file, meanwhile=partial(_kill_a_child, delay_s=case.random.uniform(0.0, 1.0)))
    if ended.code == 0:
        return Verdict(ending="same weights", words="it had ended, or was not killed")
    return _refused(case, ended)


def _long_line(case: Case) -> Verdict:
    num_bytes = 100_000_000 if case.is_full else 2_000_000
    if case.random.random() < 0.5:
        record: dict[str, object] = {"task_id": 1, "tokens": [1, 23] * (num_bytes // 7)}
    else:
        save_tokenizer(case.folder, ["a", "b", "c"])
        asked = [{"role": "user", "content": f"{n} " + "a b " * 25_000} for n in range(num_bytes // 100_000)]
        record = {"task_id": 1, "messages": [*asked, {"role": "assistant", "content": "b"}]}
    file = _write(case.folder / "set.jsonl", [json.dumps(record) + "\n"])
    return _read(case, file, {}, num_tasks=1)


def _tiny_tasks(case: Case) -> Verdict:
    number = 1_000_000 if case.is_full else 20_000
    return _read(case, _write(case.folder / "set.jsonl", _tasks(number)), {}, num_tasks=number)


def _large_task(case: Case) -> Verdict:
    number = 1_000_000 if case.is_full else 20_000
    lines = (f'{{"task_id": 1, "tokens": [1, 2, {n % 97}, {n % 89}, {n}]}}\n' for n in range(number))
    file = _write(case.folder / "set.jsonl", lines)
    return _read(case, file, {}, num_tasks=1, num_rows=number)


def _tasks(number: int) -> Iterator[str]:
    return (f'{{"task_id": {n}, "tokens": [1, 2, {n % 97}]}}\n' for n in range(number))


def _write(file: Path, lines: Iterator[str] | list[str]) -> Path:
    with file.open("w") as stream:
        stream.writelines(lines)
    return file


def _read(case: Case, file: Path, settings: dict[str, str], *, num_tasks: int, num_rows: int | None = None) -> Verdict:
    """The verdict on a command that has to read everything, or to refuse by one line."""
    ended, out = _inspect(case, file, settings)
    if ended.code != 0:
        return _refused(case, ended)
    if (trouble := trouble_of(case.run, ended)) is not None:
        return failure(trouble)
    if out["tasks"] != num_tasks or out["trajectories"] != (num_rows or num_tasks):
        return failure(f"{out['tasks']} tasks of {out['trajectories']} rows were read, and there are {num_tasks}")
    is_said = "keeps no cache" in ended.stderr
    return Verdict(ending="counted warning" if is_said else "same weights", words=ended.stderr[-200:])


def _refused(case: Case, ended: Ended) -> Verdict:
    trouble = trouble_of(case.run, ended)
    return judge_refusal(ended) if trouble is None else failure(trouble)


def _inspect(
    case: Case,
    file: Path,
    settings: dict[str, str] | None = None,
    meanwhile: Callable[[int], None] = lambda process: None,
) -> tuple[Ended, dict[str, int]]:
    """How `treering inspect` ended, and its figures of the file."""
    locations = {
        "TREERING_CACHE": str(case.folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    tokenizer = ["--tokenizer", str(case.folder)] if (case.folder / "tokenizer.json").exists() else []
    settings = settings or {}
    words = [*tokenizer, "--no-cache"] if "TMPDIR" in settings else tokenizer
    process = subprocess.Popen(
        [sys.executable, "-m", "treering", "inspect", str(file), "--json", *words],
        env={**os.environ, **locations, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY)),
        start_new_session=True,
    )
    meanwhile(process.pid)
    has_hung = False
    try:
        out, said = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        has_hung = True
        os.killpg(process.pid, signal.SIGKILL)
        out, said = process.communicate()
    figures = json.loads(out)["files"][0] if process.returncode == 0 else {}
    return Ended(code=process.returncode, stderr=said, has_hung=has_hung, is_left=is_left(process.pid)), figures


def _kill_a_child(process: int, delay_s: float) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and (found := _renderers(process)) is not None:
        if found:
            time.sleep(delay_s)
            with suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGKILL)
            return
        time.sleep(0.01)


def _renderers(process: int) -> list[int] | None:
    """Children that multiprocessing has started; None if there is no such process."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    except OSError:
        return None


SET_DISKS = (
    Kind(name="a data set", detail="cache on a full disk", happen=partial(_on_a_full_disk, variable="TREERING_CACHE")),
    Kind(
        name="a data set", detail="temporary files on a full disk", happen=partial(_on_a_full_disk, variable="TMPDIR")
    ),
    Kind(name="a data set", detail="cache on a read-only disk", happen=_on_a_read_only_disk),
)
"""These need their own disk."""
DATASETS = (
    Kind(name="a data set", detail="cut while it is read", happen=partial(_changes, change=_truncate)),
    Kind(name="a data set", detail="overwritten while it is read", happen=partial(_changes, change=_overwrite)),
    Kind(name="a data set", detail="whose tokenizer process is killed", happen=_worker_is_killed),
    Kind(name="a data set", detail="a line of 100 MB", happen=_long_line),
    Kind(name="a data set", detail="a million tiny tasks", happen=_tiny_tasks),
    Kind(name="a data set", detail="one task of a million rows", happen=_large_task),
)
