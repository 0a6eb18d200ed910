"""The example on tree rollouts runs, and what it reuses changes none of its figures but the prefilled tokens."""

import re
import runpy
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "tree_rollouts" / "run.py"
TINY = "--steps 2 --prompts 2 --roots 2 --points 2 --branches 1 --warmup-steps 1"
LINE = re.compile(r"(step +\d+  reward .*rollouts (\d+) .* sampled (\d+) \(flat (\d+)\))  prefilled (\d+)\n")


def lines_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, ...]]:
    runpy.run_path(str(RUN))["main"](arguments.split())
    lines = LINE.findall(capsys.readouterr().out)
    assert len(lines) == 2
    return lines


def test_tree_rollouts_take_fewer_samples_and_copies_change_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    copying, computing = (lines_of(f"{TINY} --continuation {mode}", capsys) for mode in ("copy", "prefill"))
    for (line, num_rollouts, num_sampled, num_flat, num_prefilled), (other, *_, num_recomputed) in zip(
        copying, computing, strict=True
    ):
        assert line == other
        assert int(num_rollouts) == 2 * (2 + 2 * 2)
        assert int(num_sampled) < int(num_flat)
        assert int(num_prefilled) < int(num_recomputed)
