"""The example on distillation runs, and measures its three ways from one start."""

import re
import runpy
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "distill_sums" / "run.py"
TINY = (
    "--steps 1 --check-every 1 --teacher-steps 1 --teacher-width 64 --student-width 64 --checked 4 --prompts 2 "
    "--rollouts 2 --group 2"
)
LINE = re.compile(r"(distilled|grpo|sft) +right every 1 steps: (\d\.\d\d)  (\d\.\d\d)  \(\d+ s\)")


def test_three_ways_begin_with_the_same_student(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(RUN))["main"](TINY.split())
    out = capsys.readouterr().out
    assert re.match(r"teacher: 0\.\d M parameters, 1 supervised steps, \d\.\d\d right\nstudent: ", out)
    found = LINE.findall(out)
    assert [name for name, *_ in found] == ["distilled", "grpo", "sft"]
    assert len({first for _, first, _ in found}) == 1
