"""Settings of the drafter inside vLLM: two environment variables and one TOML file.

Read when vLLM makes the drafter, before numba may be imported, so nothing here imports it.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from treering.errors import ConfigError

HISTORY_VARIABLE, CONFIG_VARIABLE = "TREERING_HISTORY", "TREERING_VLLM_CONFIG"

_NUMBER, _COUNT, _TEXTS = "a number", "a whole number", "a list of texts"
_KINDS: Mapping[str, str] = {
    "min_acceptance": _NUMBER,
    "min_gain": _NUMBER,
    "sources": _TEXTS,
    "max_live_tokens": _COUNT,
    "max_other_tokens": _COUNT,
    "refresh_interval_s": _NUMBER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What the drafter inside vLLM is made with; None is the default of `treering.Drafter`.

    Example: a file with the line `min_acceptance = 0.1` drafts fewer and likelier tokens.
    """

    history: Path | None = None
    """`TREERING_HISTORY`: the folder of a `HistoryStore`; None drafts from running rollouts alone."""
    min_acceptance: float | None = None
    """See `treering.Drafter`."""
    min_gain: float = 1 / 16
    """Accepted tokens a row and step below which only one step in 16 looks for drafts; 0: every step."""
    sources: tuple[str, ...] | None = None
    """See `treering.Drafter`."""
    max_live_tokens: int | None = None
    """See `treering.Drafter`."""
    max_other_tokens: int | None = None
    """See `treering.Drafter`."""
    refresh_interval_s: float = 1.0
    """How often a newer history is looked for, in a thread; 0: only when `treering_refresh` is called."""

    def drafter_options(self) -> dict[str, Any]:
        """The arguments for `treering.Drafter` that are set."""
        names = ("min_acceptance", "sources", "max_live_tokens", "max_other_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_settings(environment: Mapping[str, str] | None = None) -> PluginSettings:
    """Reads the settings of this process.

    Args:
        environment: variables by name; None is the process's own.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or has a value of another kind; all are named.

    Example: with `TREERING_HISTORY=runs/history` and nothing else, all is default but the history.
    """
    variables = os.environ if environment is None else environment
    file, folder = variables.get(CONFIG_VARIABLE), variables.get(HISTORY_VARIABLE)
    values = {} if not file else _checked(Path(file), _read(Path(file)))
    return PluginSettings(history=Path(folder) if folder else None, **values)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE} names a TOML file of `key = value` lines, and {file} cannot be read ({error}); "
            "correct it, or unset the variable"
        ) from error


def _checked(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    problems = [problem for key, value in values.items() if (problem := _problem(key, value))]
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _problem(key: str, value: object) -> str:
    """What is wrong with one setting; empty if nothing is."""
    if key not in _KINDS:
        near = difflib.get_close_matches(key, _KINDS, n=1, cutoff=0.4)
        return f"unknown key {key!r}, " + (f"nearest is {near[0]!r}" if near else f"known are {', '.join(_KINDS)}")
    if not _is_kind(value, _KINDS[key]):
        return f"{key} is {_KINDS[key]}, got {value!r}"
    if key in ("min_gain", "refresh_interval_s") and not value >= 0:  # type: ignore[operator]
        return f"{key} is 0 or more, got {value!r}"
    return ""


def _is_kind(value: object, kind: str) -> bool:
    if kind == _TEXTS:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    return isinstance(value, int if kind == _COUNT else int | float) and not isinstance(value, bool)


assert set(_KINDS) == {field.name for field in fields(PluginSettings)} - {"history"}
