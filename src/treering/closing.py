"""Objects that hold a thread, a process or a file until they are closed."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Is closed at the end of a `with` statement, also after an error.

    Example: `with Metrics(sinks) as metrics: ...` closes the sinks.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
