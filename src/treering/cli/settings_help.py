"""Describe the settings of the configurations, for `--help` and docs/settings.md.

The configuration is imported only when help is asked for, so that no other command waits for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from treering.cli.display import PlainConsole
from treering.cli.toml import as_toml

if TYPE_CHECKING:
    from treering.config import Config

_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
}
_KINDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
_FORMATS = {"path": "path", "date": "date"}
_PARTNERS = {"train": "rl", "rl": "train", "data": "task", "task": "data"}
"""Sections of the other command that share settings under a different header."""
_LARGE = 2**31
"""Bounds above this do not inform a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of a section."""

    key: str
    """Name within the section, dotted if it is in a table."""
    kind: str
    """Accepted values, as text."""
    default: str | None
    """Default as TOML; None if unset."""
    description: str
    """Effect of the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Settings under one header of a file."""

    name: str
    """Name, as in "[train]"; empty for keys above all headers."""
    type_name: str
    """Name of its type; sections of one type in two configurations have the same settings."""
    description: str
    """Subject of the section."""
    settings: tuple[Setting, ...]
    """Settings in the order of the section."""

    @property
    def title(self) -> str:
        """Header of the section."""
        return f"[{self.name}]" if self.name else "Above all headers"


def sections_of(config_type: "type[Config]") -> list[Section]:
    """Return the sections of a configuration: required ones first, then the others, then keys above all headers.

    Example: the section "train" of `SftConfig` has the setting "learning_rate" of kind "number > 0" with the default
    "0.0001".
    """
    schema = config_type.model_json_schema()
    types, fields = schema["$defs"], schema["properties"]
    names = sorted(
        (name for name, field in fields.items() if "$ref" in field), key=lambda n: n not in schema["required"]
    )
    sections = [_table_of(name, fields[name]["$ref"], types) for name in names]
    above = tuple(_setting(name, field) for name, field in fields.items() if "$ref" not in field)
    if above:
        about = "Keys outside sections; in a file they come first."
        sections.append(Section(name="", type_name="", description=about, settings=above))
    return sections


def split_by_sharing(sections: Sequence[Section], others: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    """Split a command's sections into settings of its own and settings shared with the other command's `others`.

    A section with both kinds is on both sides.
    """
    theirs = {section.name: {_meaning(one) for one in section.settings} for section in others}
    alone, shared = list[Section](), list[Section]()
    for section in sections:
        known = theirs.get(section.name) or theirs.get(_PARTNERS.get(section.name, ""), set())
        for found, is_shared in ((alone, False), (shared, True)):
            settings = tuple(one for one in section.settings if (_meaning(one) in known) == is_shared)
            if settings:
                found.append(replace(section, settings=settings))
    return alone, shared


def _meaning(setting: Setting) -> tuple[str, str, str]:
    return setting.key, setting.kind, setting.description


def kind_in_words(schema: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema accepts, as text.

    Example: `{"type": "integer", "minimum": 1}` is "integer >= 1".
    """
    if "anyOf" in schema:
        return " or ".join(kind_in_words(one) for one in schema["anyOf"] if one != {"type": "null"})
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        *first, last = map(as_toml, choices)
        return f"{', '.join(first)} or {last}" if first else last
    if parts := schema.get("prefixItems"):
        return f"[{', '.join(map(kind_in_words, parts))}]"
    if "$ref" in schema or schema["type"] == "object":
        return "table"
    if schema["type"] == "array":
        return f"array of {kind_in_words(schema['items'])}"
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if schema.get(key, _LARGE) < _LARGE]
    kind = _FORMATS.get(schema.get("format", ""), _KINDS[schema["type"]])
    return f"{kind} {' and '.join(bounds)}".rstrip()


def _table_of(name: str, reference: str, types: Mapping[str, Any]) -> Section:
    type_name = reference.rpartition("/")[2]
    return Section(
        name=name,
        type_name=type_name,
        # Examples of the records are Python.
        description=_one_line(types[type_name]["description"].partition("\n\nExample")[0]),
        settings=tuple(_settings(types[type_name], types, "")),
    )


def _settings(schema: Mapping[str, Any], types: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    for name, field in schema["properties"].items():
        if "$ref" in field:
            yield from _settings(types[field["$ref"].rpartition("/")[2]], types, f"{prefix}{name}.")
        else:
            yield _setting(f"{prefix}{name}", field)


def _setting(key: str, field: Mapping[str, Any]) -> Setting:
    default = field.get("default")
    return Setting(
        key=key,
        kind=kind_in_words(field),
        default=None if default is None else as_toml(default),
        description=_one_line(field["description"]),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


_HEAD = "Settings of CONFIG, a TOML file: key, default, description. Override one with SECTION.KEY=VALUE."


class SettingsCommand(TyperCommand):
    """Command `sft` or `train`, whose help ends with the settings of its configuration file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the command's own help, then the sections."""
        super().format_help(ctx, formatter)
        from treering.config import RlConfig, SftConfig

        configs: list[type[Config]] = [SftConfig, RlConfig]
        own, other = configs if self.name == "sft" else reversed(configs)
        alone, shared = split_by_sharing(sections_of(own), sections_of(other))
        console = PlainConsole()
        console.print(_HEAD)
        for section in alone:
            console.print(_section(section))
        console.print("\nShared by sft and train:")
        for section in shared:
            console.print(_section(section))


def _section(section: "Section") -> Group:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(max_width=14, overflow="fold")
    table.add_column()
    for setting in section.settings:
        # Use `Text`, so that brackets are not parsed as markup.
        words = Text.assemble(setting.description, (f" ({setting.kind})", "dim"))
        default = Text("unset", "dim") if setting.default is None else Text(setting.default)
        table.add_row(f"  {setting.key}", default, words)
    return Group("", Text.assemble((section.title, "bold cyan"), f"  {section.description}"), table)
