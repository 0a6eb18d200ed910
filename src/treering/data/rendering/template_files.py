"""What a Hugging Face tokenizer folder says of its chat templates: their texts, and the special tokens they name."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treering.errors import ConfigError
from treering.files.json_object import read_object

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_FURTHER_TEMPLATES = "additional_chat_templates"


def chat_templates(folder: Path) -> Mapping[str, str]:
    """The chat templates of a folder by name; empty if it has none.

    A single template is called "default"; one for chats with tools may be called "tool_use". Files of their own come
    before those in tokenizer_config.json.

    Raises:
        ConfigError: a file cannot be read.

    Example: for a folder with `chat_template.jinja` alone it is `{"default": ...}`.
    """
    files = {path.stem: path for path in sorted((folder / _FURTHER_TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE_FILE).is_file():
        files["default"] = folder / _TEMPLATE_FILE
    if files:
        return MappingProxyType({name: _text(path) for name, path in files.items()})
    given = read_settings(folder / CONFIG_FILE).get("chat_template") or {}
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    templates = {"default": given} if isinstance(given, str) else given
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ConfigError(
            f"chat_template is a text, or a list of names and templates, {folder / CONFIG_FILE} has another value; "
            "fetch it again"
        )
    return MappingProxyType(templates)


def named_tokens(folder: Path) -> Mapping[str, str | None]:
    """The special tokens that the folder gives a name, such as bos_token; None where it says that there is none.

    Raises:
        ConfigError: a file is no JSON object.

    Example: Qwen2's have `{"bos_token": None, "eos_token": "<|endoftext|>", ...}`.
    """
    settings = read_settings(folder / CONFIG_FILE)
    if "added_tokens_decoder" not in settings:
        # Older folders have them in a file of their own.
        settings |= read_settings(folder / SPECIAL_TOKENS_FILE)
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: token_text(value) for name, value in named.items()}
    return MappingProxyType({name: texts[name] for name in named if texts[name] or named[name] is None})


def special_tokens(folder: Path) -> tuple[str, ...]:
    """Texts of all special tokens, each once.

    Raises:
        ConfigError: a file is no JSON object.
    """
    settings = read_settings(folder / CONFIG_FILE)
    added = [
        *read_settings(folder / "tokenizer.json").get("added_tokens", ()),
        *settings.get("added_tokens_decoder", {}).values(),
    ]
    lists = [settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    listed = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
    found = [*(token for token in added if token.get("special")), *listed, *named_tokens(folder).values()]
    return tuple(dict.fromkeys(text for text in map(token_text, found) if text))


def token_text(value: Any) -> str | None:
    """The text of a token that is stored as such, or as an object with its settings; None for anything else.

    Example: it is "</s>" for `{"content": "</s>", "lstrip": false}`.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_settings(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a tokenizer folder; empty if there is no such file.

    Raises:
        ConfigError: it is no JSON object.
    """
    return read_object(file, ConfigError) if file.is_file() else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a file of a tokenizer can be read, {file} cannot ({error}); fetch it again") from error
