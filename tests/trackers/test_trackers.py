"""Each tracker gets the metrics under their own names, and a resumed run goes on in the same place.

They run with the real packages and without a network, each in a process of its own, because they start threads and
processes and read the environment when they are imported.
"""

import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treering.errors import MissingExtraError, StateError
from treering.trackers.identity import TRACKERS_FILE, name_of, read_names
from treering.trackers.mlflow_sink import MlflowSink
from treering.trackers.trackio_sink import TrackioSink
from treering.trackers.wandb_sink import WandbSink

SINKS = {"wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink}

# Steps 1 to 3, then a second process from step 2 on, as a run that was killed and resumed.
RUN = """
import sys
from pathlib import Path
from treering.metrics import Completion, Metrics
from treering.trackers.{name}_sink import {kind} as Sink

first, last, resume_step = int(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
with Metrics([Sink(Path("runs/a"), project="sums", resume_step=resume_step, settings={{"rl": {{"seed": 7}}}})]) as log:
    for step in range(first, last + 1):
        if step != 2:
            log.log_completions(
                step, [Completion(prompt=f"p{{step}}", completion="c\\n", reward=0.5, advantage=None)]
            )
        log.log(step, {{"reward/mean": 0.5 * step, "rollout/num_sampled": 10 * step}})
"""
READ = {
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("sums")
rows = [row for run in runs for row in SQLiteStorage.get_logs("sums", run)]
found = {int(row["step"]): [row["reward/mean"], row["rollout/num_sampled"]] for row in rows if "reward/mean" in row}
tables = {int(row["step"]): row["completions"]["_value"][0]["prompt"] for row in rows if "completions" in row}
""",
    "mlflow": """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient()
runs = [run.info.run_id for run in client.search_runs([client.get_experiment_by_name("sums").experiment_id])]
names = ("reward/mean", "rollout/num_sampled")
histories = [{point.step: point.value for point in client.get_metric_history(runs[0], name)} for name in names]
found = {step: [history[step] for history in histories] for step in histories[0]}
assert client.get_run(runs[0]).data.params["rl.seed"] == "7"
tables = {}
for item in client.list_artifacts(runs[0], "completions"):
    table = json.loads(open(client.download_artifacts(runs[0], item.path)).read())
    tables[int(item.path[-11:-5])] = dict(zip(table["columns"], table["data"][0]))["prompt"]
""",
    "wandb": """
import json
import struct
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
    # LevelDB's log format after a header of 7 bytes: blocks of 32 KiB; chunks are whole (1), first, middle or last (4).
    at, record = 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""

found, runs, tables = {}, set(), {}
for file in sorted(Path("runs/a").rglob("*.wandb")):
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            runs.add(record.run.run_id)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[row["_step"]] = [row["reward/mean"], row["rollout/num_sampled"]]
            if "completions/path" in row:
                (table,) = Path("runs/a").rglob(f"files/{row['completions/path']}")
                table = json.loads(table.read_text())
                tables[row["_step"]] = dict(zip(table["columns"], table["data"][0]))["prompt"]
""",
}


def python(code: str, folder: Path, *arguments: str) -> str:
    """Stdout of a program without a network."""
    settings = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(tracker: str, folder: Path) -> tuple[dict[str, Any], int, dict[str, str]]:
    """What a tracker has: the values by step, how many runs, and the prompt of each table by step."""
    print_all = '\nimport json\nprint("FOUND", json.dumps([found, len(set(runs)), tables]))'
    out = python(READ[tracker] + print_all, folder)
    found, num_runs, tables = json.loads(out.partition("FOUND")[2])
    return found, num_runs, tables


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
@pytest.mark.timeout(300)
def test_a_resumed_run_goes_on_in_the_same_run_of_a_tracker(tracker: str, tmp_path: Path) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"needs {tracker}")
    code = RUN.format(name=tracker, kind=SINKS[tracker].__name__)
    python(code, tmp_path, "1", "3", "None")
    python(code, tmp_path, "3", "5", "2")
    found, num_runs, tables = written(tracker, tmp_path)
    assert found == {str(step): [0.5 * step, 10 * step] for step in range(1, 6)}
    assert num_runs == 1
    assert tables == {str(step): f"p{step}" for step in (1, 3, 4, 5)}


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
def test_without_its_package_a_tracker_says_how_to_get_it(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(
        MissingExtraError, match=rf"\[\"{tracker}\"\] needs {tracker}: pip install 'treering\[{tracker}\]'"
    ):
        SINKS[tracker](tmp_path, project="sums")
    assert not (tmp_path / TRACKERS_FILE).exists()


def test_a_new_run_has_a_new_name_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    first = name_of(tmp_path, "trackio", is_new=True, stem="a-")
    assert first.startswith("a-")
    assert name_of(tmp_path, "trackio", is_new=False, stem="a-") == first
    other = name_of(tmp_path, "wandb", is_new=False)
    assert read_names(tmp_path) == {"trackio": first, "wandb": other}
    assert name_of(tmp_path, "trackio", is_new=True, stem="a-") != first


def test_damaged_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / TRACKERS_FILE).write_text("[1")
    with pytest.raises(StateError, match=r"cannot be read .*; remove it"):
        read_names(tmp_path)


def test_a_server_that_is_gone_costs_a_warning_and_no_step() -> None:
    def gone(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no server")

    sink = MlflowSink.__new__(MlflowSink)
    sink._has_failed, sink._run_id = False, "a"
    sink._metric = lambda *values: values
    sink._client = SimpleNamespace(log_batch=gone, set_terminated=gone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            sink.write(step, {"reward/mean": 0.5})
        sink.close()
    first, last = (str(warning.message) for warning in caught)
    assert "did not take step 1 (no server)" in first
    assert "still shows the run as running" in last
