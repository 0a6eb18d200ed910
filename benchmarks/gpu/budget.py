"""One part of the device benchmark: cases within a time budget, each on file as soon as it is measured.

A case that fails or no longer fits is named in the report, and the others go on.
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

Cell = dict[str, Any]
"""The result of a case, ready for JSON."""


class Budget:
    """Seconds that parts share; the time that one leaves goes to the next ones.

    Example: of 100 seconds, a part with a share of 0.2 gets 20; if it takes 5, half of the rest is 47.5.
    """

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s

    def share_s(self, share: float) -> float:
        """That share of the seconds left."""
        return share * max(0.0, self._end - time.monotonic())


class PartReport:
    """The cases, skipped cases and errors of one part, written to a file after each case.

    A case starts only if its expected time still fits; the most important ones come first.
    """

    def __init__(
        self,
        name: str,
        budget_s: float,
        *,
        environment: Cell,
        goals: Cell | None = None,
        file: Path | None = None,
    ) -> None:
        self.name = name
        self.cases: list[Cell] = []
        self.skipped: list[Cell] = []
        self.errors: list[Cell] = []
        self._environment, self._goals, self._file = environment, goals or {}, file
        self._budget_s, self._start = budget_s, time.monotonic()
        self._durations: list[float] = []

    def run(self, case: str, measure: Callable[[], Cell], *, expected_s: float | None = None) -> Cell | None:
        """Measures a case, if it fits, and writes the report; None where it was skipped or failed.

        Args:
            case: its name.
            measure: returns the result.
            expected_s: seconds that it takes, about; None takes the median of the finished cases without one.
        """
        left = self._budget_s - (time.monotonic() - self._start)
        expected = self._median_s() if expected_s is None else expected_s
        if left <= expected:
            room = f"{max(left, 0.0):.0f} s left of {self._budget_s:.0f} s"
            self.skip(case, f"{room}, a case takes about {expected:.0f} s")
            return None
        began = time.monotonic()
        found = self._measured(case, measure)
        took = time.monotonic() - began
        if expected_s is None:
            self._durations.append(took)
        if found is not None:
            self.cases.append({"case": case, **found, "case_s": took})
        self.write()
        return found

    def _median_s(self) -> float:
        return statistics.median(self._durations) if self._durations else 0.0

    def skip(self, case: str, reason: str) -> None:
        """Records and prints that a case is not measured."""
        self.skipped.append({"case": case, "reason": reason})
        print(f"{self.name}: {case} skipped ({reason})", flush=True)
        self.write()

    def fail(self, case: str, error: str) -> None:
        """Records and prints an error of a case or of one of its ways; the run then ends with an error."""
        self.errors.append({"case": case, "error": error})
        print(f"{self.name}: {case} FAILED: {error}", flush=True)

    def as_json(self) -> Cell:
        """The report so far."""
        return {
            "cases": self.cases,
            "skipped": self.skipped,
            "errors": self.errors,
            "goals": self._goals,
            "environment": self._environment,
        }

    def write(self) -> None:
        """Writes the report to its file, whole or not at all."""
        if self._file is None:
            return
        draft = self._file.with_suffix(".tmp")
        draft.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(self._file)

    def _measured(self, case: str, measure: Callable[[], Cell]) -> Cell | None:
        try:
            found = measure()
            # A value that is not JSON, such as NaN, would fail every later write.
            json.dumps(found, allow_nan=False)
            return found
        except Exception as error:
            # The other cases still run; the exit status reports this one.
            self.fail(case, in_words(error))
            return None
        finally:
            # After some errors every call to the device fails; the next cases will report that.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


def in_words(error: Exception) -> str:
    """The kind of an error and the start of its message.

    Example: `ValueError("no")` is "ValueError: no".
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
