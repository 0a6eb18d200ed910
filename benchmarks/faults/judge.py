"""How a case ended: as one of the three ways that are allowed, or as a failure."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.faults.damage import MARKER
from benchmarks.faults.runs import Ended
from benchmarks.faults.task import Task, weights_of

Ending = Literal["same weights", "counted warning", "one line", "failure"]
ENDINGS: tuple[Ending, ...] = ("same weights", "counted warning", "one line", "failure")

LOGS = ("metrics.jsonl", "rollouts/epoch-*.jsonl")

TOLERANCE = 1e-5
"""Largest difference of a weight after a history was lost: drafts change the shapes that are computed in, and so the
rounding in float32. Everything else is compared bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The ending of a case.

    Attributes:
        ending: see `Ending`.
        is_bitwise: whether the weights are those of an undisturbed run, bit by bit.
        words: what went wrong, or what was said.
    """

    ending: Ending
    is_bitwise: bool = False
    words: str = ""


def failure(words: str) -> Verdict:
    """A case that ended in no allowed way."""
    return Verdict(ending="failure", words=words)


def judge(task: Task, folder: Path, ended: Ended, *, may_round: bool = False) -> Verdict:
    """The verdict on the last run of a case in a folder; `may_round`: whether a history was lost."""
    trouble = trouble_of(folder, ended)
    if trouble is not None:
        return failure(trouble)
    if ended.code != 0:
        return judge_refusal(ended)
    difference = _difference(task, folder)
    if difference > (TOLERANCE if may_round else 0.0):
        return failure(f"the weights differ by {difference:.2g}")
    warnings = [line for line in ended.stderr.splitlines() if line.startswith("warning: ")]
    lost = _num_lost(task, folder)
    told = sum(int(number) for line in warnings for number in re.findall(r"(\d+) missing line", line))
    if lost != told:
        return failure(f"{lost} lines of the logs are lost, and {told} are told")
    if num_more := _num_more(task, folder):
        return failure(f"{num_more} lines of the logs are there twice")
    return Verdict(
        ending="counted warning" if warnings else "same weights",
        is_bitwise=difference == 0.0,
        words="; ".join(warnings),
    )


def judge_stop(folder: Path, ended: Ended) -> Verdict | None:
    """What is wrong with a run that was stopped by its disk and will be resumed; None if nothing is."""
    trouble = trouble_of(folder, ended)
    if trouble is not None:
        return failure(trouble)
    verdict = None if ended.code == 0 else judge_refusal(ended)
    return verdict if verdict is not None and verdict.ending == "failure" else None


def trouble_of(folder: Path, ended: Ended) -> str | None:
    """What no run may end with, whatever it met; None if it did not."""
    if ended.has_hung:
        return "it hung"
    if "Traceback" in ended.stderr:
        return f"a traceback: {ended.stderr.splitlines()[-1]}"
    if ended.is_left:
        return "processes were left behind"
    return "a pickle was executed" if (folder.parent / MARKER).exists() else None


def judge_refusal(ended: Ended) -> Verdict:
    """The verdict on a run that did not end with exit code 0."""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("treering: ")]
    if len(lines) != 1 or not ended.stderr.endswith(f"{lines[0]}\n"):
        return failure(f"exit code {ended.code} without one clear line: {ended.stderr[-200:]!r}")
    return Verdict(ending="one line", words=lines[0])


def _difference(task: Task, folder: Path) -> float:
    """Largest difference of a weight from the undisturbed run's; infinite if the run left none."""
    left, right = weights_of(task.whole, task.num_steps), weights_of(folder, task.num_steps)
    if left.keys() != right.keys():
        return float("inf")
    return max(0.0 if torch.equal(left[name], right[name]) else _distance(left[name], right[name]) for name in left)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).abs().max())


def _num_lost(task: Task, folder: Path) -> int:
    """Lines of the undisturbed run's logs that the folder's lack, by step."""
    return sum(sum((_lines_of(task.whole, log) - _lines_of(folder, log)).values()) for log in LOGS)


def _num_more(task: Task, folder: Path) -> int:
    """Lines of the folder's logs that the undisturbed run's lack, by step."""
    return sum(sum((_lines_of(folder, log) - _lines_of(task.whole, log)).values()) for log in LOGS)


def _lines_of(folder: Path, pattern: str) -> Counter[int]:
    return Counter(
        json.loads(line)["step"] for file in sorted(folder.glob(pattern)) for line in file.read_text().splitlines()
    )
