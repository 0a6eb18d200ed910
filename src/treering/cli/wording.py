"""Settings in messages as the command that one used calls them; the library calls them as Python does."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"inspect": r"--\1 \3", "sft": r'data.\1 = "\3"', "train": r'task.\1 = "\3"'}
)
_ARGUMENT = re.compile(r'\b(template|tokenizer)=("?)(\w+)\2')


def in_words_of(command: str, message: str) -> str:
    """The message with the names that settings have in a command; unchanged for commands without them.

    Example: 'use template="plain"' is "use --template plain" for inspect, and 'use data.template = "plain"' for sft.
    """
    form = _SETTINGS.get(command)
    return message if form is None else _ARGUMENT.sub(form, message)
