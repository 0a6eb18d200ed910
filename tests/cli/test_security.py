"""A run executes nothing from its folder, writes nowhere else, leaks no environment variable, and opens no port."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.runs import Commands
from treering.data import Trajectory, read_trajectories
from treering.files.writing import MANIFEST, _digest
from treering.history.store.store import HistoryStore
from treering.rl.step_report import RolloutLog

SOURCE = Path(__file__).parents[2] / "src"


class Bomb:
    """Object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


def files_of(run: Path) -> list[Path]:
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def test_no_pickle_of_a_run_folder_is_executed(commands: Commands) -> None:
    marker = commands.folder / "marker"
    commands.done("train")
    for name in files_of(commands.folder / "out"):
        shutil.copytree(commands.folder / "out", commands.folder / "bad", dirs_exist_ok=True)
        (commands.folder / "bad" / name).write_bytes(pickle.dumps(Bomb(marker)))
        commands.run("train", "run.dir=bad", "rl.num_steps=5")
        assert not marker.exists(), name
        shutil.rmtree(commands.folder / "bad")


@pytest.mark.parametrize(
    "write", [lambda bomb, file: torch.save(bomb, file), lambda bomb, file: pickle.dump(bomb, file)]
)
def test_a_pickle_whose_checksum_is_right_is_refused_in_one_line(
    commands: Commands, write: Callable[[object, object], None]
) -> None:
    commands.done("train")
    marker = commands.folder / "marker"
    checkpoint = commands.folder / "out" / "checkpoints" / "step-000004"
    with (checkpoint / "training_state.pt").open("wb") as file:
        write({"loop": Bomb(marker), "random": Bomb(marker)}, file)
    content = (checkpoint / "training_state.pt").read_bytes()
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    facts = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["training_state.pt"] = facts
    # An attacker also rewrites the manifest's own checksum.
    manifest["sha256"] = _digest({name: manifest[name] for name in ("facts", "files")})
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    line = commands.refused("train", "rl.num_steps=5")
    assert (
        "a checkpoint may hold only tensors and plain values, and out/checkpoints/step-000004 holds something else"
        in line
    )
    assert "none of it was run" in line
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../../x", "/tmp/treering-x", "a/b", "..", "\0", "epoch-001.jsonl"])
def test_names_in_data_never_become_paths(tmp_path: Path, name: str) -> None:
    import numpy as np

    tokens = np.array([1, 2, 3], np.int32)
    run = tmp_path / "a" / "b" / "run"
    log = RolloutLog(run / "rollouts")
    log.write(0, [Trajectory(task_id=name, step=1, tokens=tokens)])
    assert read_trajectories(run / "rollouts" / "epoch-000.jsonl")[0].task_id == name
    with HistoryStore(run / "history") as store:
        store.add(name, [tokens], 0)
        store.publish()
        store.save(run / "saved")
        assert store.snapshot[name].num_tokens == 3
    made = [str(path) for path in files_of(tmp_path)]
    assert made == [
        f"a/b/run/{file}"
        for file in (
            "history/.lock",
            "history/history-00000000.bin",
            "rollouts/epoch-000.jsonl",
            "saved",
        )
    ]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_and_folders_have_the_modes_that_the_umask_leaves(commands: Commands, umask: int) -> None:
    before = os.umask(umask)
    try:
        commands.done("train", 'metrics.sinks=["jsonl", "tensorboard"]')
    finally:
        os.umask(before)
    run = commands.folder / "out"
    modes = {path.relative_to(run): stat.S_IMODE(path.stat().st_mode) for path in [run, *run.rglob("*")]}
    expected = {name: (0o777 if (run / name).is_dir() else 0o666) & ~umask for name in modes}
    assert modes == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net")
def test_a_run_listens_to_loopback_only_and_writes_its_environment_nowhere(commands: Commands) -> None:
    hidden = {name: f"hidden-{name}" for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANYTHING")}
    environment = os.environ | hidden | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    code = "from treering.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "train.toml"]
    command += ["rl.num_steps=2000", "run.save_every=1", 'metrics.sinks=["jsonl", "tensorboard"]']
    run, told = commands.folder / "out", commands.folder / "told"
    with told.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=commands.folder, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and not list(run.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        members = [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if session_of(pid) == process.pid
        ]
        addresses = [address for pid in members for address in listening(pid)]
        assert [address for address in addresses if not is_loopback(address)] == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert b"hidden-" not in told.read_bytes()
    assert len(files_of(run)) > 8
    for name in files_of(run):
        assert b"hidden-" not in (run / name).read_bytes(), name


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def listening(pid: int) -> list[str]:
    """Return local addresses, in hexadecimal, of a process's sockets that listen or receive datagrams."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    # 0A is a listening TCP socket, 07 an unconnected UDP one.
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[9:] and row[9] in own and row[3] in ("0A", "07")]


def is_loopback(address: str) -> bool:
    return address in ("0100007F", "00000000000000000000000001000000")
