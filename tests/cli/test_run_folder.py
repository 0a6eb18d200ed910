"""The folder of a run: damage is reported and kept, one process writes, and a failing disk loses no checkpoint."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.runs import Commands, assert_same_weights, rows
from treering.errors import InputError, StateError

HOLDER = """
import sys, time
from pathlib import Path
from treering.cli.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
NAMES = ("run.json", "config.json", "metrics.jsonl", "run.lock", "rollouts/epoch-000.jsonl")
FOLDERS = ("checkpoints", "history", "rollouts", "tensorboard", "warmup")


def counts(run: Path, log: str) -> list[int]:
    return sorted(int(str(row["step"])) for file in run.glob(log) for row in rows(file))


def test_lost_lines_are_counted_and_the_run_goes_on_with_the_same_weights(commands: Commands) -> None:
    run = commands.folder / "out"
    commands.done("train", "run.dir=whole", "rl.num_steps=6")
    commands.done("train")
    for log in ("metrics.jsonl", "rollouts/epoch-000.jsonl"):
        lines = (run / log).read_bytes().splitlines(keepends=True)
        (run / log).write_bytes(b"".join([b"\0" * 9 + lines[0], *lines[1:]]))
    (run / "rollouts" / "epoch-001.jsonl").unlink()
    err = commands.done("train", "rl.num_steps=6")
    warned = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 2
    assert (
        "metrics.jsonl is damaged: 1 unreadable line, 1 missing line of step 1; the damaged file is kept" in warned[0]
    )
    # The row with step 1's number of rollouts is lost, and so is one of its rollouts.
    assert "rollouts is damaged: 1 unreadable line, 12 missing lines of steps 3 to 4" in warned[1]
    assert (run / "metrics.jsonl.damaged").exists()
    assert (run / "rollouts" / "epoch-000.jsonl.damaged").exists()
    assert counts(run, "metrics.jsonl") == [2, 3, 4, 5, 6]
    assert counts(run, "rollouts/epoch-*.jsonl") == [1] * 5 + [2] * 6 + [5] * 6 + [6] * 6
    assert_same_weights(commands.folder / "whole", run, 6)


def test_the_rows_of_steps_say_how_many_rollouts_are_logged(commands: Commands) -> None:
    commands.done("train", "rl.num_steps=2")
    commands.done("train", "rl.num_steps=3", "run.rollouts=off")
    logged = [row.get("rollout/num_logged") for row in rows(commands.folder / "out" / "metrics.jsonl")]
    assert logged == [6, 6, None]
    # Steps that were not logged do not count as missing.
    assert "warning" not in commands.done("train", "rl.num_steps=4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_what_stands_where_a_file_belongs_is_named_in_one_line(commands: Commands, name: str, what: str) -> None:
    path = commands.folder / "out" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if what == "folder" else os.mkfifo(path)
    line = commands.refused("train")
    assert name in line
    assert re.search("move it|remove it|remove the file", line)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_stands_where_a_folder_belongs_is_named_in_one_line(commands: Commands, name: str) -> None:
    (commands.folder / "out").mkdir()
    (commands.folder / "out" / name).touch()
    for command in ("train", "sft"):
        assert f"out/{name} must be a folder" in commands.refused(command)


def test_a_run_folder_that_is_a_file_is_named_in_one_line(commands: Commands) -> None:
    (commands.folder / "out").touch()
    for command in ("train", "sft"):
        assert "out cannot be written (File exists)" in commands.refused(command)
        assert "out/a cannot be written (Not a directory)" in commands.refused(command, "run.dir=out/a")


def test_links_are_followed(commands: Commands) -> None:
    for name in ("out", "disk", "other"):
        (commands.folder / name).mkdir()
    (commands.folder / "out" / "metrics.jsonl").symlink_to(commands.folder / "disk" / "m.jsonl")
    (commands.folder / "out" / "checkpoints").symlink_to(commands.folder / "other")
    commands.done("sft", "train.num_steps=2")
    commands.done("sft")
    assert counts(commands.folder, "disk/m.jsonl") == [1, 2, 3, 4]
    assert (commands.folder / "other" / "step-000004").is_dir()


def test_a_link_that_leads_nowhere_is_named_in_one_line(commands: Commands) -> None:
    for name, target in (("metrics.jsonl", "absent/m.jsonl"), ("checkpoints", "absent"), ("run.json", "run.json")):
        run = commands.folder / f"run-of-{name}"
        run.mkdir()
        (run / name).symlink_to(target)
        assert f"{run.name}/{name}" in commands.refused("sft", f"run.dir={run}")


def test_a_second_process_in_a_run_folder_is_refused_until_the_first_is_dead(commands: Commands) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, "out"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for command in ("sft", "train"):
            line = commands.refused(command)
            assert f"process {holder.pid}, which started it at " in line
            assert "trains in out, and a run folder takes one process at a time" in line
        assert sorted(path.name for path in (commands.folder / "out").iterdir()) == ["run.lock"]
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    commands.done("sft")


def test_drafts_of_a_killed_process_are_removed(commands: Commands) -> None:
    drafts = [commands.folder / "out" / name for name in (".run.json.1", "rollouts/.epoch-000.jsonl.unfinished")]
    for draft in drafts:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
    commands.done("train")
    assert [draft for draft in drafts if draft.exists()] == []


def test_a_second_demo_in_a_folder_is_refused(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.cli import demo
    from treering.cli.run_folder import locked

    def measure(out: Path, *_: object, **__: object) -> None:
        with pytest.raises(StateError, match=f"process {os.getpid()}, .* trains in demo"), locked(out):
            pass
        raise InputError("that is all")

    monkeypatch.setattr(demo, "measure", measure)
    for _ in range(2):
        with pytest.raises(InputError, match="that is all"):
            demo.run(out=Path("demo"), seed=0, json_output=True)


class Disk:
    """Disk that fails at every Python-level write to a path that contains a text."""

    def __init__(self) -> None:
        self._text = ""
        self._number = 0
        sys.addaudithook(self._see)

    @contextmanager
    def failing(self, text: str, number: int) -> Iterator[None]:
        self._text, self._number = text, number
        try:
            yield
        finally:
            self._text = ""

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._text or event not in ("open", "os.mkdir") or self._text not in str(arguments[0]):
            return
        is_writing = event == "os.mkdir" or bool(int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR))
        if is_writing:
            raise OSError(self._number, os.strerror(self._number))


DISK = Disk()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("/run.lock", errno.EROFS),
        ("/.run.json", errno.ENOSPC),
        ("/.config.json", errno.EROFS),
        ("metrics.jsonl", errno.ENOSPC),
        ("rollouts/epoch", errno.EDQUOT),
        ("unfinished-step-000002", errno.ENOSPC),
        ("history/.unfinished", errno.EDQUOT),
        # Its writer is a thread, which prints the error too.
        pytest.param(
            "tensorboard/events",
            errno.ENOSPC,
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
        ),
    ],
)
def test_a_disk_that_fails_anywhere_is_one_line_and_the_run_can_go_on(
    commands: Commands, text: str, number: int
) -> None:
    settings = ['metrics.sinks=["jsonl", "tensorboard"]']
    with DISK.failing(f"out{text}" if text.startswith("/") else text, number):
        line = commands.refused("train", f"run.dir={commands.folder / 'out'}", *settings)
    assert os.strerror(number) in line
    assert str(commands.folder / "out") in line
    left = list((commands.folder / "out").glob("checkpoints/*"))
    assert left == []
    commands.done("train", f"run.dir={commands.folder / 'out'}", *settings)


@pytest.mark.parametrize("num_bytes", [500, 5000, 20_000])
def test_a_file_that_may_not_grow_ends_the_run_in_one_line_and_it_goes_on_without_the_limit(
    commands: Commands, num_bytes: int
) -> None:
    commands.done("sft", "run.dir=whole", "train.num_steps=8")
    commands.done("sft", "train.num_steps=2")
    before = (commands.folder / "out" / "checkpoints" / "step-000002" / "manifest.json").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        line = commands.refused("sft", "train.num_steps=8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(r"out/\S+ cannot be written \(File too large\): [\d,a-z ]+ bytes are needed and files are", line)
    assert f"limited to {num_bytes:,} (ulimit -f)" in line
    assert (commands.folder / "out" / "checkpoints" / "step-000002" / "manifest.json").read_bytes() == before
    assert [path.name for path in (commands.folder / "out" / "checkpoints").iterdir()] == ["step-000002"]
    commands.done("sft", "train.num_steps=8")
    assert_same_weights(commands.folder / "whole", commands.folder / "out", 8)
