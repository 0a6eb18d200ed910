"""Errors that teach: each message states the rule, the offending value and the fix.

Every error is also a standard-library one, so callers may catch either.
"""


class TreeringError(Exception):
    """Base of all errors that Treering raises."""


class InputError(TreeringError, ValueError):
    """Invalid data: an empty sequence, a token out of range, a mask of the wrong length, a corrupt line."""


class ConfigError(TreeringError, ValueError):
    """Invalid configuration: an unknown key, a value of the wrong type, contradictory settings."""


class UnsupportedError(TreeringError, NotImplementedError):
    """Something that Treering refuses instead of computing it wrongly: a layer, a model, an output head."""


class MissingExtraError(TreeringError, ImportError):
    """A package of an extra that is not installed; the message names the extra."""


class StateError(TreeringError, RuntimeError):
    """Something used at the wrong time, or damaged: a checkpoint of another run, a backward out of its context."""


class DataWarning(UserWarning):
    """Data that is read, with something that its owner should know; each sentence is said once."""


class Interrupted(BaseException):
    """A signal ends the run: raised by the handlers of the command line, in the main thread.

    Not an `Exception`, so that no code that handles errors takes it for one.

    Example: `Interrupted(signal.SIGTERM).signal_number` is 15.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
