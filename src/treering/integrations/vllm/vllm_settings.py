"""How vLLM is asked for drafts: its arguments, the drafter's own settings, and what a request says of itself.

Read before numba may be imported, so nothing here imports it.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from treering.errors import ConfigError, InputError, UnsupportedError
from treering.types import PromptId, is_count

PROPOSER = "treering.integrations.vllm.HistoryProposer"
MAX_DRAFT = 64
"""Most tokens that a `treering.Drafter` drafts for a row."""


def speculative_config(max_draft: int) -> dict[str, Any]:
    """VLLM's argument of that name for drafts of up to so many tokens from history.

    Example: `LLM(model, speculative_config=speculative_config(16))`.
    """
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": max_draft}


def check_config(vllm_config: Any) -> None:
    """Refuses a configuration under which vLLM would not call the drafter, or call it too late.

    Raises:
        UnsupportedError: names what was set, and what to set.

    Example: a `VllmConfig` with asynchronous scheduling is refused, and `--no-async-scheduling` named.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise UnsupportedError(
            "HistoryProposer runs in vLLM's V1 model runner, and this configuration selects Model Runner V2, which "
            "calls no custom proposer; set VLLM_USE_V2_MODEL_RUNNER=0"
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


@contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Inside, variables that processes read at their start have the values of `changes`; then what they had."""
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


KEY = "treering"
"""The entry of `extra_args`."""


class RequestIdentity(NamedTuple):
    """Which rollout a request samples."""

    prompt_id: PromptId
    draw: int
    num_prompt_tokens: int | None  # None: the prompt that vLLM knows is the original one


def request_args(prompt_id: PromptId, draw: int = 0, *, num_prompt_tokens: int | None = None) -> dict[str, Any]:
    """The `extra_args` of a request; requests with equal prompt_id and draw are siblings.

    Args:
        prompt_id: of the prompt in the history; see `PromptId`.
        draw: how many times the run has scheduled this prompt before.
        num_prompt_tokens: tokens of the original prompt, for a rollout that is continued: its tokens so far are part
            of the prompt that vLLM gets. 0 where the history of the prompt_id has whole contexts, as of episodes.

    Raises:
        InputError: an id that is neither text nor whole number, or a negative or fractional count.

    Example: `SamplingParams(max_tokens=64, extra_args=request_args("q1", draw=2))`.
    """
    if type(prompt_id) not in (str, int):
        raise InputError(f"a prompt_id is text or an integer, got {prompt_id!r}; convert it")
    if not is_count(draw, least=0):
        raise InputError(f"draw is a whole number, at least 0, got {draw!r}; count how often the prompt was scheduled")
    if num_prompt_tokens is None:
        return {KEY: {"prompt_id": prompt_id, "draw": int(draw)}}
    if not is_count(num_prompt_tokens, least=0):
        raise InputError(f"num_prompt_tokens is a whole number, at least 0, got {num_prompt_tokens!r}; correct it")
    return {KEY: {"prompt_id": prompt_id, "draw": int(draw), "num_prompt_tokens": int(num_prompt_tokens)}}


def read_request_args(extra_args: Mapping[str, Any] | None) -> RequestIdentity | None:
    """The identity in a request's `extra_args`; None if there is none, or none that `request_args` makes.

    Example: `read_request_args(request_args("q1", 2))` is ("q1", 2, None).
    """
    args = (extra_args or {}).get(KEY)
    if not isinstance(args, Mapping):
        return None
    prompt_id, draw, size = (args.get(name) for name in RequestIdentity._fields)
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool) or not is_count(draw, least=0):
        return None
    return RequestIdentity(prompt_id, draw, size if is_count(size, least=0) else None)
