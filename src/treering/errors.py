"""Errors that teach: each message states the rule, the offending value and the fix.

Every error is also a standard-library one, so callers may catch either.
"""


class TreeringError(Exception):
    """Base of every error that Treering raises on purpose."""


class InputError(TreeringError, ValueError):
    """Data that breaks a rule: an empty sequence, a token out of range, a mask of the wrong length, a corrupt line."""


class ConfigError(TreeringError, ValueError):
    """A configuration that breaks a rule: an unknown key, a value of the wrong type, settings that contradict."""


class UnsupportedError(TreeringError, NotImplementedError):
    """Something that Treering refuses by name instead of computing it wrongly: a layer, a model, an output head."""


class MissingExtraError(TreeringError, ImportError):
    """A package that is not installed because the extra that brings it was left out; the message names the extra."""


class StateError(TreeringError, RuntimeError):
    """Something used at the wrong time or found damaged: a checkpoint of another run, a backward out of its context."""
