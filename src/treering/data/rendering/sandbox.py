"""A Jinja sandbox for chat templates, with the functions and filters of Transformers, for which they are written.

Templates are untrusted code, so they get only plain values and cannot reach the interpreter. This module is imported on
first use, because it needs jinja2.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import date as Date
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from treering.errors import ConfigError

_SAFE = (3, 1, 6)
"""First version of Jinja whose sandbox has no known escape."""

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of a template that cannot render some messages."""


@lru_cache(maxsize=16)
def compiled(text: str, date: Date) -> Callable[..., str]:
    """Compile a checked template to a function of its variables; `strftime_now` formats `date`."""
    environment = _environment()
    environment.globals["strftime_now"] = date.strftime
    return environment.from_string(text).render


def variables(text: str) -> frozenset[str]:
    """Return the names of a template's variables.

    Raises:
        ConfigError: the text is not a template, or the installed Jinja has no safe sandbox.
    """
    _check_version()
    try:
        return frozenset(find_undeclared_variables(_environment().parse(text)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"a chat template is Jinja, and this one is not ({error}); fetch it again") from error


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists and scalars, whose methods a template cannot misuse."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "dict": _Dict(), "namespace": _Names}
    return environment


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the policy's text; it renders its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a set here

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dict:
    """`dict` without the methods of a type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Names(Namespace):
    """`namespace` that refuses names with a leading underscore, such as Python's internals."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **names).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a name in a namespace begins with a letter, got {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_version() -> None:
    found = tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3]))
    if found < _SAFE:
        raise ConfigError(
            f"chat templates are code of strangers, and Jinja before 3.1.6 lets them leave its sandbox; this is "
            f"{jinja2.__version__}: pip install -U 'jinja2>=3.1.6'"
        )
