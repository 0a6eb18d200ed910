"""Metrics: what the sinks write, that no step is logged twice, and that NaN survives."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treering import metrics
from treering.errors import InputError, StateError
from treering.metrics import JsonlSink, Metrics


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def with_steps(path: Path, last: int) -> Path:
    path.write_text("".join(f'{{"step": {step}, "a": {step / 2}}}\n' for step in range(1, last + 1)))
    return path


def test_a_row_is_one_json_object_with_its_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with Metrics([JsonlSink(path)]) as log:
        log.log(1, {metrics.LOSS: 2.5, metrics.NUM_TOKENS: 7})
        log.log(3, {metrics.LOSS: 1.25})
    assert rows(path) == [{"step": 1, "train/loss": 2.5, "train/num_tokens": 7}, {"step": 3, "train/loss": 1.25}]


def test_a_row_is_in_the_file_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": 1})
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "a": 1}]
    sink.close()


def test_numpy_and_torch_numbers_are_numbers(tmp_path: Path) -> None:
    values = {"i": np.int32(3), "f": np.float32(0.5), "t": torch.tensor(0.25), "n": torch.tensor(4), "b": 2**40}
    with Metrics([JsonlSink(tmp_path / "m.jsonl")]) as log:
        log.log(0, values)
    assert rows(tmp_path / "m.jsonl") == [{"step": 0, "i": 3, "f": 0.5, "t": 0.25, "n": 4, "b": 2**40}]


@given(st.floats())
def test_every_float_comes_back_from_its_row(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("floats") / "m.jsonl"
    with Metrics([JsonlSink(path)]) as log:
        log.log(1, {"a": value})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    back = float(json.loads(path.read_text(), parse_constant=refuse)["a"])
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_a_resumed_file_keeps_the_rows_up_to_its_step_and_no_step_stands_twice(tmp_path: Path) -> None:
    path = with_steps(tmp_path / "m.jsonl", 9)
    with Metrics([JsonlSink(path, resume_step=6)]) as log:
        log.log(7, {"a": 0.0})
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert rows(path)[5] == {"step": 6, "a": 3.0}


def test_a_new_run_refuses_the_file_of_another_and_leaves_it_whole(tmp_path: Path) -> None:
    path = with_steps(tmp_path / "m.jsonl", 2)
    with pytest.raises(StateError, match=r"m\.jsonl holds rows of another run; choose another"):
        JsonlSink(path)
    assert len(rows(path)) == 2


def test_steps_are_logged_once_and_in_order(tmp_path: Path) -> None:
    with Metrics([JsonlSink(tmp_path / "m.jsonl")]) as log:
        log.log(2, {"a": 1})
        for step in (2, 1):
            with pytest.raises(StateError, match=f"step {step} comes after step 2"):
                log.log(step, {"a": 1})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", 1, "needs a name"),
        ("step", 1, "needs a name"),
        ("a", "high", "'a' is 'high'"),
        ("a", None, "'a' is None"),
        ("a", torch.zeros(2), "a metric is one number"),
        ("a", torch.zeros(1), "a metric is one number"),
        ("a", [1.0], "a metric is one number"),
    ],
)
def test_a_value_that_is_not_a_metric_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    with Metrics([JsonlSink(tmp_path / "m.jsonl")]) as log:
        with pytest.raises(InputError, match=message):
            log.log(1, {"good": 1, name: value})
        log.log(1, {"good": 2})
    assert rows(tmp_path / "m.jsonl") == [{"step": 1, "good": 2}]


def test_a_closed_sink_takes_no_more_and_closes_again(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "log")
    with Metrics([sink]):
        pass
    with pytest.raises((OSError, ValueError)):
        sink.write(1, {"a": 1})
    sink.close()


def test_no_two_metrics_share_a_name() -> None:
    names = [value for key, value in vars(metrics).items() if key.isupper()]
    assert len(names) == len(set(names)) > 5
