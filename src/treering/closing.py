"""Objects that hold a thread, a process or a file until they are closed."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base of objects that a `with` statement closes at its end, also after an error.

    Example: `with Metrics(sinks) as metrics: ...` closes the sinks.
    """

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
