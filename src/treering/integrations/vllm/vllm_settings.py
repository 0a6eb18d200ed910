"""Settings of drafts in vLLM: its arguments, the drafter's settings, and the identity that a request carries.

This file is read before numba may be imported, so it must not import numba.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from treering.errors import ConfigError, InputError, UnsupportedError
from treering.types import PromptId, is_count

PROPOSER = "treering.integrations.vllm.HistoryProposer"
MAX_DRAFT = 64
"""Most tokens that a `treering.Drafter` drafts per row."""


def speculative_config(max_draft: int) -> dict[str, Any]:
    """Return vLLM's argument of that name for drafts of up to `max_draft` tokens from history.

    Example: `LLM(model, speculative_config=speculative_config(16))`.
    """
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": max_draft}


def check_config(vllm_config: Any) -> None:
    """Refuse a configuration under which vLLM would not call the drafter, or would call it too late.

    Raises:
        UnsupportedError: names what was set and what to set.

    Example: a `VllmConfig` with asynchronous scheduling is refused, naming `--no-async-scheduling`.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise UnsupportedError(
            "HistoryProposer runs in vLLM's V1 model runner, but this configuration selects Model Runner V2, which "
            "does not call custom proposers; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise UnsupportedError(
            "HistoryProposer reads each step's tokens before it drafts for the next, got async_scheduling=True; set "
            "--no-async-scheduling"
        )
    most = vllm_config.speculative_config.num_speculative_tokens
    if not 1 <= most <= MAX_DRAFT:
        raise UnsupportedError(
            f"HistoryProposer drafts 1 to {MAX_DRAFT} tokens, got num_speculative_tokens={most}; 16 is usual"
        )


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
    """Settings of the drafter inside vLLM; None: the default of `treering.Drafter`.

    Example: a file with the line `min_acceptance = 0.1` drafts fewer and likelier tokens.
    """

    history: Path | None = None
    """`TREERING_HISTORY`: folder of a `HistoryStore`; None: drafts come only from running rollouts."""
    min_acceptance: float | None = None
    """`min_acceptance` of `treering.Drafter`."""
    min_gain: float = 1 / 16
    """Accepted tokens per row and step below which only one step in 16 looks for drafts; 0: every step."""
    sources: tuple[str, ...] | None = None
    """`sources` of `treering.Drafter`."""
    max_live_tokens: int | None = None
    """`max_live_tokens` of `treering.Drafter`."""
    max_other_tokens: int | None = None
    """`max_other_tokens` of `treering.Drafter`."""
    refresh_interval_s: float = 1.0
    """Seconds between checks, in a thread, for a newer history; 0: only when `treering_refresh` is called."""

    def drafter_options(self) -> dict[str, Any]:
        """Return the arguments for `treering.Drafter` that are set."""
        names = ("min_acceptance", "sources", "max_live_tokens", "max_other_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_settings(environment: Mapping[str, str] | None = None) -> PluginSettings:
    """Read the settings of this process.

    Args:
        environment: variables by name; None: the process's own.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or has a value of the wrong type; names all of them.

    Example: with only `TREERING_HISTORY=runs/history` set, everything but the history is default.
    """
    variables = os.environ if environment is None else environment
    file, folder = variables.get(CONFIG_VARIABLE), variables.get(HISTORY_VARIABLE)
    values = {} if not file else _checked(Path(file), _read(Path(file)))
    return PluginSettings(history=Path(folder) if folder else None, **values)


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables that child processes read at their start; restore them on exit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE} names a TOML file of `key = value` lines, but {file} cannot be read ({error}); "
            "correct it, or unset the variable"
        ) from error


def _checked(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    problems = [problem for key, value in values.items() if (problem := _problem(key, value))]
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _problem(key: str, value: object) -> str:
    """Return what is wrong with one setting; empty if nothing is."""
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


KEY = "treering"
"""Entry of `extra_args` that holds the identity."""


class RequestIdentity(NamedTuple):
    """Identity of the rollout that a request samples."""

    prompt_id: PromptId | None  # None: the drafter finds it by vLLM's prompt
    draw: int
    num_prompt_tokens: int | None  # None: vLLM's prompt is the original prompt
    rehearsed: Sequence[int] = ()  # tokens that probably follow vLLM's prompt


def request_args(
    prompt_id: PromptId | None,
    draw: int = 0,
    *,
    num_prompt_tokens: int | None = None,
    rehearsed: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the `extra_args` of a request; requests with equal prompt_id and draw are siblings.

    Over HTTP they are its `vllm_xargs`, where vLLM takes no mappings: send the value as JSON text.

    Args:
        prompt_id: id of the prompt in the history; None: the drafter finds it by the prompt's tokens, as in requests
            without these arguments, and ignores draw and num_prompt_tokens.
        draw: how many times the run has scheduled this prompt before.
        num_prompt_tokens: length of the original prompt, for a continued rollout: vLLM gets its tokens so far as part
            of the prompt. 0 if the history of the prompt_id holds whole contexts, as episodes do.
        rehearsed: the rollout's first tokens as sampled under earlier weights with the same seed, which are drafted.

    Raises:
        InputError: an id that is not text, a whole number or None, or a negative or fractional count.

    Example: `SamplingParams(max_tokens=64, extra_args=request_args("q1", draw=2))`.
    """
    if prompt_id is not None and type(prompt_id) not in (str, int):
        raise InputError(f"prompt_id must be text or an integer, got {prompt_id!r}; convert it")
    if not is_count(draw, least=0):
        raise InputError(f"draw must be a whole number >= 0, got {draw!r}; count how often the prompt was scheduled")
    args: dict[str, Any] = {"prompt_id": prompt_id, "draw": int(draw)}
    if num_prompt_tokens is not None:
        if not is_count(num_prompt_tokens, least=0):
            raise InputError(f"num_prompt_tokens must be a whole number >= 0, got {num_prompt_tokens!r}; correct it")
        args["num_prompt_tokens"] = int(num_prompt_tokens)
    if len(rehearsed):
        args["rehearsed"] = [int(token) for token in rehearsed]
    return {KEY: args}


def read_request_args(extra_args: Mapping[str, Any] | None) -> RequestIdentity | None:
    """Return the identity in a request's `extra_args`; None if it is missing or malformed.

    Example: `read_request_args(request_args("q1", 2))` is ("q1", 2, None, ()).
    """
    args = (extra_args or {}).get(KEY)
    if isinstance(args, str):
        args = _parsed(args)
    if not isinstance(args, Mapping):
        return None
    prompt_id, draw, size, rehearsed = (args.get(name) for name in RequestIdentity._fields)
    if not isinstance(prompt_id, str | int | None) or isinstance(prompt_id, bool) or not is_count(draw, least=0):
        return None
    tokens = rehearsed if isinstance(rehearsed, list) and all(is_count(one, least=0) for one in rehearsed) else ()
    return RequestIdentity(prompt_id, draw, size if is_count(size, least=0) else None, tokens)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
