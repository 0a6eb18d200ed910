"""Errors whose messages state the rule, the offending value and the fix.

Every error is also an error of the standard library, so callers may catch either.
"""


class TreeringError(Exception):
    """Base of all errors that Treering raises."""


class InputError(TreeringError, ValueError):
    """Invalid data: an empty sequence, a token out of range, a mask of the wrong length, a corrupt line."""


class ContextFullError(InputError):
    """A context that has no room for another token; an environment that catches it may still return a reward.

    The message contains "maximum context length". Over HTTP the code is "context_length_exceeded".
    """


class ConfigError(TreeringError, ValueError):
    """Invalid configuration: an unknown key, a value of the wrong type, contradictory settings."""


class UnsupportedError(TreeringError, NotImplementedError):
    """A layer, model or output head that Treering refuses because it would compute it wrongly."""


class MissingExtraError(TreeringError, ImportError):
    """A package of an extra is not installed; the message has the command that installs it."""


class StateError(TreeringError, RuntimeError):
    """A call at the wrong time, or a damaged file: a checkpoint of another run, a backward outside its context."""


class DataWarning(UserWarning):
    """Readable data with a property that its owner should know; each warning is given once."""


class Interrupted(BaseException):
    """A signal ended the run; the command line's signal handlers raise it in the main thread.

    It is not an `Exception`, so that code that handles errors does not catch it.

    Example: `Interrupted(signal.SIGTERM).signal_number` is 15.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 prompt", "2 prompts", "1,200 prompts".

    `many` is the plural if it is not `one` with an s.

    Example: `plural(1, "branch", "branches")` is "1 branch".
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
