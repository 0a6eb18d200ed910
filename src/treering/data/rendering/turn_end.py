"""How a chat template ends an assistant's turn, learned from a chat of marks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treering.data.rendering.rendered_parts import common_length
from treering.data.trajectory import Message
from treering.errors import InputError

_QUESTION, _ANSWER, _NEXT = "mark-1-kram", "mark-2-kram", "mark-3-kram"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a chat's last turn differs from the same turn in history."""

    missing: str = ""
    """The token that ends a turn but stands only after turns in history, such as GLM's next role."""
    added: str = ""
    """A token that the template writes after the end of the last turn, such as Phi-3's end of text."""

    def length(self, written: str) -> int:
        """How much of a last turn the policy wrote: a last line break and an added token are the template's."""
        return len(written.rstrip("\n").removesuffix(self.added).rstrip("\n"))


def find_turn_end(
    prompt: Callable[[Sequence[Message]], str], text: Callable[[Sequence[Message]], str], special_tokens: Sequence[str]
) -> TurnEnd:
    r"""Compares an answer at the end of a chat with the same answer before a further question.

    Args:
        prompt: renders messages with a turn opened after them.
        text: renders messages alone.
        special_tokens: texts of the tokenizer's special tokens.

    Raises:
        InputError: the template opens a turn after an answer where the caller asked for none.

    Example: Phi-3's template writes `<|end|>\n<|endoftext|>` after a last answer and `<|end|>\n<|user|>` before a
    question, so `added` is `<|endoftext|>`.
    """
    asked, answered = Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)
    try:
        opened, alone, once = prompt([asked]), text([asked]), text([asked, answered])
        again = text([asked, answered, Message(role="user", content=_NEXT)])
    except InputError:
        return TurnEnd()
    last = once.partition(_ANSWER)[2]
    opening = opened.partition(_QUESTION)[2]
    if opened == alone and opening.strip() and last.endswith(opening):
        raise InputError(
            f"a chat template must open a turn only where add_generation_prompt is set, and it always does, with "
            f'{opening!r:.80}; use template="plain", or another template of this model'
        )
    between = again.partition(_ANSWER)[2].partition(_NEXT)[0]
    if not last.strip():
        return TurnEnd(missing=leading_token(between, special_tokens))
    return TurnEnd(added=_added(last, between, special_tokens))


def leading_token(text: str, special_tokens: Sequence[str]) -> str:
    r"""The special token that a text begins with; "" if it begins with none.

    Example: of `<|user|>\nHi` it is `<|user|>`.
    """
    found = _any_of(special_tokens).match(text)
    return found.group() if found else ""


def _added(last: str, between: str, special_tokens: Sequence[str]) -> str:
    shared = common_length(last, between)
    ends = [found.end() for found in _any_of(special_tokens).finditer(last) if found.end() <= shared]
    rest = last[ends[-1] :].strip() if ends else ""
    return rest if rest in special_tokens else ""


def _any_of(special_tokens: Sequence[str]) -> re.Pattern[str]:
    # The longest first: one token's text may begin another's. Without any, a pattern that matches nothing.
    return re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")
