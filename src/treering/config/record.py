"""Read a typed configuration: a TOML file, then dotted overrides, then validation."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, to_jsonable_python

from treering.config.problems import describe, holds_still, keys_for_python, section_type
from treering.errors import ConfigError


class Config(BaseModel):
    """Base of every configuration and section: frozen, strict types, no unknown keys, no NaN or infinity.

    Python callers and files make the same records. A field with `exclude=True` is for Python only: it is not in files,
    in --help, or in the identity of a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    if not TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None:
            """Check the settings.

            Raises:
                ConfigError: a setting is unknown, has a wrong type or contradicts another.
            """
            try:
                self.__pydantic_validator__.validate_python(settings, self_instance=self)
            except ValidationError as error:
                raise ConfigError(f"{type(self).__name__}: {'; '.join(describe(error, type(self)))}") from error

        # pydantic makes nested records its own way, so that all problems of a file are reported.
        __init__.__pydantic_base_init__ = True

    def changed(self, **settings: Any) -> Self:
        """Return a copy with other values of some settings, checked again.

        Example: `Sampling(max_tokens=8).changed(top_k=1)` equals `Sampling(max_tokens=8, top_k=1)`.
        """
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | settings)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Omit Python-only fields, and put a class's own fields before inherited ones."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in cls.model_fields.items():
            if field.exclude:
                del schema["properties"][name]
        own = {name for name in cls.model_fields if name in cls.__annotations__}
        schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda each: each[0] not in own))
        return schema


ConfigT = TypeVar("ConfigT", bound=Config)


def load(config_type: type[ConfigT], path: Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Read a configuration of type `config_type`.

    Args:
        config_type: the model with the valid keys and their types.
        path: a TOML file, or None for defaults and overrides only.
        overrides: `section.key=value`, later ones win; the value is read as TOML (`8`, `1e-4`, `true`, `["a", "b"]`)
            and, if that fails, as a string, unless it has the brackets of a list or table.

    Raises:
        ConfigError: the file is missing or not TOML, an override has no key, or a setting is unknown, has a wrong type
            or contradicts another; one message lists all problems.

    Example: with `[train]` and `num_steps = 100` in `run.toml`,
    `load(SftConfig, Path("run.toml"), ["train.num_steps=3"]).train.num_steps` is 3.
    """
    return _validated(
        config_type,
        {} if path is None else read_toml(path),
        overrides,
        source="configuration" if path is None else str(path),
    )


def load_written(
    config_type: type[ConfigT], written: Mapping[str, Any], overrides: Sequence[str], *, source: str
) -> ConfigT:
    """Read the settings that a run wrote into its folder, including defaults.

    A setting at its default counts as not set, as in the original file, and so does a removed setting whose old value
    now always holds.

    Raises:
        ConfigError: as for `load`; the message calls the settings `source`.

    Example: `load_written(SftConfig, config.model_dump(mode="json"), [], source="config.json")` equals `config`.
    """
    return _validated(config_type, _without_defaults(config_type, written), overrides, source=source)


def _without_defaults(config_type: type[BaseModel], written: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in written.items():
        field = config_type.model_fields.get(name)
        inner = None if field is None else section_type(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            if inside := _without_defaults(inner, value, f"{prefix}{name}."):
                kept[name] = inside
        elif holds_still(f"{prefix}{name}", value):
            continue
        elif field is None or value != to_jsonable_python(field.get_default(call_default_factory=True)):
            kept[name] = value
    return kept


def _validated(
    config_type: type[ConfigT], settings: dict[str, Any], overrides: Sequence[str], *, source: str
) -> ConfigT:
    for override in overrides:
        _apply(override, settings)
    problems = keys_for_python(settings, config_type)
    try:
        if not problems:
            return config_type.model_validate(_with_sections(config_type, settings))
    except ValidationError as error:
        problems = describe(error, config_type)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError(f"{source}: {count}: {'; '.join(problems)}")


def _with_sections(config_type: type[BaseModel], settings: dict[str, Any]) -> dict[str, Any]:
    """Add an empty table for each missing section, so that its own validation names the missing keys."""
    fields = config_type.model_fields.items()
    sections: dict[str, Any] = {name: {} for name, field in fields if section_type(field.annotation) is not None}
    return sections | settings


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file, unchecked.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; write `key = value` lines under [section] headers") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): a configuration must be a readable TOML file; check the path"
        ) from error


def _apply(override: str, settings: dict[str, Any]) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"an override must be section.key=value, got {override!r}; for example train.num_steps=10")
    *sections, last = keys
    for depth, table in enumerate(_tables(settings, sections)):
        if not isinstance(table, dict):
            raise ConfigError(
                f"an override sets a key of a section, and in {override!r} {'.'.join(keys[:depth])!r} is the value "
                f"{table!r}; set {'.'.join(keys[:depth])}={text} instead"
            )
        if depth == len(sections):
            table[last] = _parsed(text.strip())


def _tables(settings: dict[str, Any], sections: Sequence[str]) -> Iterator[Any]:
    """Yield the tables along a dotted path, outermost first; missing ones are created."""
    table: Any = settings
    yield table
    for section in sections:
        table = table.setdefault(section, {})
        yield table


def _parsed(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[:1] + text[-1:] in ("[]", "{}"):
            raise ConfigError(
                f"a list or table in an override is TOML, whose texts have quotes, got {text}; write "
                "'data.files=[\"a.jsonl\"]'"
            ) from None
        return text
    # Text with a line break could contain further keys, so accept only a single value.
    return document["value"] if document.keys() == {"value"} else text
