"""Chat templates as Jinja in a sandbox, with the names that Transformers gives them: templates are written for these.

Templates are code of strangers, so they see plain values only and cannot reach the interpreter. This file is imported
on first use, because it needs jinja2.
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
"""The first Jinja whose sandbox has no known way out."""

REFUSALS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""What a template raises that cannot render some messages."""


@lru_cache(maxsize=16)
def compiled(text: str, date: Date) -> Callable[..., str]:
    """The function that renders a checked template with given variables; `strftime_now` in it writes the date.

    Example: `compiled("{{ messages | length }}", today)(messages=[1, 2])` is "2".
    """
    environment = _environment()
    environment.globals["strftime_now"] = date.strftime
    return environment.from_string(text).render


def variables(text: str) -> frozenset[str]:
    """The names that a template takes from outside.

    Raises:
        ConfigError: the text is no template, or the installed Jinja has no safe sandbox.

    Example: of `{{ bos_token }}{% for m in messages %}{{ m }}{% endfor %}` they are bos_token and messages.
    """
    _check_version()
    try:
        return frozenset(find_undeclared_variables(_environment().parse(text)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"a chat template is Jinja, and this one is not ({error}); fetch it again") from error


def plain(value: Any) -> Any:
    """A value as dicts, lists and scalars, which have no methods that a template could misuse.

    Example: `plain(MappingProxyType({"a": (1,)}))` is `{"a": [1]}`.
    """
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
    """`{% generation %}`, around what the policy writes: it renders its content."""

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
    """`namespace` whose names cannot begin with an underscore, as those of Python's internals do."""

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
    # Jinja's own filter escapes characters of HTML.
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
