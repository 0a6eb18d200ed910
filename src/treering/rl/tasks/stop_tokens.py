"""Which tokens end a turn of a policy: those of its tokenizer, its chat template, its model folder and the settings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.errors import ConfigError, InputError
from treering.files.json_object import read_object
from treering.rl.tasks.text_tokens import TextTokens

_MODEL_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopToken:
    """A token that ends a turn.

    Example: `str(StopToken(token_id=2, text="<|im_end|>", source="tokenizer"))` is "<|im_end|> (2, tokenizer)".
    """

    token_id: int
    text: str | None
    """As the tokenizer has it; None if the tokenizer has no such id."""
    source: str
    """Where it was found first."""

    def __str__(self) -> str:
        return f"{self.text or 'a token without text'} ({self.token_id}, {self.source})"


def find_stop_tokens(
    tokens: TextTokens, *, end_of_turn: str | None = None, model: Path | None = None, named: Sequence[str | int] = ()
) -> tuple[StopToken, ...]:
    """All tokens that end a turn, each once, in the order of the arguments.

    Args:
        tokens: the tokenizer, with its `end_tokens`.
        end_of_turn: of the chat template (`text_tokens.end_of_turn`); None if it has none or is not used.
        model: the policy's folder, whose generation_config.json and config.json name one `eos_token_id` or several.
        named: texts or ids of single tokens, as the user set them.

    Raises:
        ConfigError: a named text is not one token, or a named id is none of the tokenizer's.
        InputError: one of the model's two files cannot be read.

    Example: Llama 3's tokenizer ends texts with <|end_of_text|>, its template turns with <|eot_id|>, and its
    generation_config.json adds <|eom_id|>: all three stop a rollout.
    """
    found: list[tuple[int, str]] = [(token_id, "tokenizer") for token_id in tokens.end_tokens]
    if end_of_turn is not None and (token_id := tokens.id_of(end_of_turn)) is not None:
        found.append((token_id, "chat template"))
    found += [] if model is None else _ends_of_model(model)
    found += [(_named_id(tokens, one), "task.stop_tokens") for one in named]
    sources = dict(reversed(found))
    return tuple(
        StopToken(token_id=token_id, text=tokens.text_of(token_id), source=sources[token_id])
        for token_id in dict.fromkeys(token_id for token_id, _ in found)
    )


def _named_id(tokens: TextTokens, named: str | int) -> int:
    token_id = named if isinstance(named, int) else tokens.id_of(named)
    if token_id is None:
        raise ConfigError(
            f"task.stop_tokens names single tokens, and {named!r} is none of {tokens.folder}; write it as in its "
            "tokenizer.json, or give the id"
        )
    if tokens.text_of(token_id) is None:
        raise ConfigError(
            f"task.stop_tokens holds ids of the tokenizer, and {named} is none of {tokens.folder}, which has "
            f"{tokens.vocab_size}; correct it"
        )
    return token_id


def _ends_of_model(folder: Path) -> list[tuple[int, str]]:
    found = []
    for file in (folder / name for name in _MODEL_FILES):
        settings = read_object(file) if file.is_file() else {}
        # Models of text and images keep the text's settings in an object of their own.
        inner = settings.get("text_config")
        for place in (settings, inner if isinstance(inner, dict) else {}):
            found += [(token_id, file.name) for token_id in _ids(place.get("eos_token_id"), file)]
    return found


def _ids(value: Any, file: Path) -> Iterator[int]:
    """The ids of a field that has one, several or none; -1 stands for none."""
    values: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if type(token_id) is not int:
            raise InputError(f"{file}: eos_token_id is a token id or a list of them, got {value!r}; correct it")
        if token_id >= 0:
            yield token_id
