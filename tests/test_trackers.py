"""Trackers get the metrics under their own names, and a resumed run continues in the same place."""

import math
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import PartialState, tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from treering.config.run import MetricsConfig, RlMetricsConfig
from treering.errors import ConfigError, MissingExtraError, StateError
from treering.metrics import Completion, JsonlSink, Metrics
from treering.trackers import TRACKERS_FILE, TrackerSink

SINKS = [name for name in MetricsConfig.model_fields["sinks"].annotation.__args__[0].__args__ if name != "jsonl"]
WITH_IDS = [name for name in SINKS if name != "tensorboard"]
ROLLOUT = Completion(prompt="1+|2\n", completion="3", reward=1.0, advantage=None)


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events_of(folder).Scalars(tag)]


def tensorboard(folder: Path, resume_step: int | None = None) -> TrackerSink:
    return TrackerSink("tensorboard", folder, project="sums", resume_step=resume_step, settings={"seed": 7})


class FakeTracker:
    """Tracker that keeps what it gets, with the interface of accelerate's trackers."""

    def __init__(self, project: str, /, **options: Any) -> None:
        self.project, self.options, self.rows, self.settings, self.finished = project, options, [], None, 0
        self.main_process_only = True
        self.tracker = SimpleNamespace(id="its-id", name=options.get("name"), info=SimpleNamespace(run_id="its-id"))

    def start(self) -> None:
        assert not self.main_process_only

    def store_init_configuration(self, values: dict) -> None:
        self.settings = values

    def log(self, values: dict, step: int, **options: Any) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeTracker]:
    """The trackers that were made, in order."""
    made: list[FakeTracker] = []

    def make(*arguments: Any, **options: Any) -> FakeTracker:
        made.append(FakeTracker(*arguments, **options))
        return made[-1]

    for name in SINKS:
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, make)
    monkeypatch.setattr("treering.trackers.require", lambda *names: None)
    return made


def test_every_sink_gets_every_step(tmp_path: Path) -> None:
    with Metrics([JsonlSink(tmp_path / "m.jsonl"), tensorboard(tmp_path)]) as log:
        log.log(1, {"a": 0.5})
        log.log(2, {"a": float("inf")})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "a": 0.5}\n{"step": 2, "a": "inf"}\n'
    assert scalars(tmp_path, "a") == [(1, 0.5), (2, math.inf)]


def test_a_step_is_in_the_event_file_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = tensorboard(tmp_path)
    sink.write(1, {"a": 0.5})
    assert scalars(tmp_path, "a") == [(1, 0.5)]
    sink.close()
    sink.close()


def test_a_resumed_tensorboard_shows_no_step_twice(tmp_path: Path) -> None:
    with Metrics([tensorboard(tmp_path)]) as log:
        for step in range(1, 10):
            log.log(step, {"a": 1.0})
    with Metrics([tensorboard(tmp_path, resume_step=6)]) as log:
        log.log(7, {"a": 2.0})
    assert scalars(tmp_path, "a") == [*((step, 1.0) for step in range(1, 7)), (7, 2.0)]


def test_tensorboard_shows_rollouts_as_a_table_of_text(tmp_path: Path) -> None:
    with Metrics([tensorboard(tmp_path)]) as log:
        log.log_completions(3, [ROLLOUT])
        log.log(3, {"a": 1.0})
    (tag,) = [tag for tag in events_of(tmp_path).PluginTagToContent("text") if tag.startswith("completions")]
    (event,) = events_of(tmp_path).Tensors(tag)
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | completion | reward | advantage |",
        "| --- | --- | --- | --- |",
        r"| 1+\|2 ⏎  | 3 | 1.0 | None |",
    ]


def test_a_tracker_begins_no_process_group_where_a_launcher_left_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartialState, "_shared_state", {})
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with Metrics([tensorboard(tmp_path)]) as log:
        log.log(1, {"a": 1.0})
    assert not dist.is_initialized()
    assert os.environ["LOCAL_RANK"] == "1"
    assert scalars(tmp_path, "a") == [(1, 1.0)]


@pytest.mark.parametrize("tracker", WITH_IDS)
def test_a_resumed_run_goes_on_in_the_same_run_of_a_tracker_and_a_new_one_does_not(
    tracker: str, tmp_path: Path, fake: list[FakeTracker]
) -> None:
    for resume_step in (None, 2, None):
        with Metrics([TrackerSink(tracker, tmp_path / "a", project="sums", resume_step=resume_step)]) as log:
            log.log(3, {"reward/mean": 0.5})
    first, again, new = fake
    begun = first.options.get("name") if tracker == "trackio" else "its-id"
    assert begun in again.options.values()
    assert begun not in new.options.values()
    assert tracker == "trackio" or begun not in first.options.values()
    for one in fake:
        assert (one.project, one.rows, one.finished) == ("sums", [(3, {"reward/mean": 0.5})], 1)
        assert tracker == "comet_ml" or any(str(value).startswith("a") for value in one.options.values())


@pytest.mark.parametrize("tracker", WITH_IDS)
def test_every_tracker_shows_the_settings_of_a_new_run(tracker: str, tmp_path: Path, fake: list[FakeTracker]) -> None:
    TrackerSink(tracker, tmp_path, project="sums", settings={"rl": {"seed": 7}})
    (one,) = fake
    assert one.options.get("config") == {"rl": {"seed": 7}} or one.settings == {"rl.seed": 7}


@pytest.mark.parametrize("tracker", SINKS)
def test_without_its_package_a_tracker_prints_how_to_install_it(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(
        MissingExtraError, match=rf"\[\"{tracker}\"\] needs {tracker}: pip install .*{tracker.replace('_', '-')}"
    ):
        TrackerSink(tracker, tmp_path, project="sums")
    assert not list(tmp_path.iterdir())


def test_without_accelerate_a_tracker_prints_how_to_install_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"needs accelerate: pip install .*tensorboard"):
        tensorboard(tmp_path)


def test_a_tracker_that_fails_costs_one_warning_and_no_step(tmp_path: Path, fake: list[FakeTracker]) -> None:
    def gone(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no server")

    sink = TrackerSink("mlflow", tmp_path, project="sums")
    fake[0].log = fake[0].finish = gone  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            sink.write(step, {"reward/mean": 0.5})
        sink.close()
    (warning,) = caught
    assert "mlflow did not take step 1 (no server); the run goes on" in str(warning.message)


def test_a_tracker_that_cannot_begin_is_refused_by_name(
    tmp_path: Path, fake: list[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeTracker) -> None:
        raise PermissionError("not logged in")

    monkeypatch.setattr(FakeTracker, "start", refuse)
    with pytest.raises(StateError, match=r"swanlab cannot start the run of .* \(not logged in\); .* from metrics"):
        TrackerSink("swanlab", tmp_path, project="sums")


def test_damaged_ids_are_refused(tmp_path: Path, fake: list[FakeTracker]) -> None:
    (tmp_path / TRACKERS_FILE).write_text("[1")
    with pytest.raises(StateError, match=r"cannot be read .*; remove it"):
        TrackerSink("wandb", tmp_path, project="sums", resume_step=1)


def test_tables_are_refused_where_no_sink_takes_them() -> None:
    with pytest.raises(
        ConfigError, match=r"log_completions = 2 needs the sink .*, got sinks = \['jsonl', 'mlflow'\]; add one"
    ):
        RlMetricsConfig(sinks=("jsonl", "mlflow"), log_completions=2)
    assert RlMetricsConfig(sinks=("mlflow", "wandb"), log_completions=2).log_completions == 2
