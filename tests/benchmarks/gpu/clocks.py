"""A clock for budgets that tests set."""

from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            self.now += seconds
            return {"took": seconds}

        return measure
