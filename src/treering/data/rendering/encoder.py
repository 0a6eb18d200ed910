"""Encodes scripts to token ids and masks: a token is trained if its first character is in a trained span.

Uses the small `tokenizers` package, no model library.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treering.data.rendering.script import TURN_END, TURN_START, Script, Span, join_scripts
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.types import LossMask, TokenIds

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedScript:
    """Token ids int32 [T], their mask bool [T], and int32 [turns], one past each turn's last token."""

    tokens: TokenIds
    loss_mask: LossMask
    turn_ends: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"


def join_encoded(parts: Sequence[EncodedScript]) -> EncodedScript:
    """Joins encoded scripts and shifts their turn ends.

    Example: 3 tokens without a turn and 2 tokens with turn end 2 join to 5 tokens with turn end 5.
    """
    offsets = np.cumsum([0] + [part.tokens.size for part in parts[:-1]])
    turn_ends = [part.turn_ends + offset for part, offset in zip(parts, offsets, strict=True)]
    return EncodedScript(
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        turn_ends=np.concatenate(turn_ends).astype(np.int32),
    )


class Encoder:
    """A tokenizer folder, opened once.

    Example: `Encoder(Path("qwen3")).encode([[Script(text="Hi", spans=(Span(0, 2),))]])[0].loss_mask` is `[True]`.
    """

    def __init__(self, folder: Path) -> None:
        """Opens `folder/tokenizer.json`; raises ConfigError if it is missing or broken."""
        self._tokenizer = open_tokenizer(folder)
        # A marker may be an added token that is not special; data must not write it either.
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {
            token.content: i for i, token in added.items() if token.special or token.content in (TURN_START, TURN_END)
        }
        self._control_ids = np.array(sorted(self._control.values()), np.int32)
        isolating = [token for token in self._control if _isolates(self._tokenizer, token)]
        self._isolates_turns = TURN_START in isolating
        self._boundary = re.compile("|".join(map(re.escape, isolating)) or r"(?!)")

    def encode(self, conversations: Sequence[Sequence[Script]]) -> list[EncodedScript]:
        """Encodes each list of scripts as the tokenizer encodes their concatenation, without added tokens.

        A script's cuts fall between tokens. Text of special tokens outside its markers becomes ordinary tokens.
        Special tokens split a text anyway, so equal stretches between them are tokenized once.

        Raises:
            InputError: text outside the markers that the tokenizer cannot encode as ordinary tokens.
        """
        joined = conversations if self._isolates_turns else [[join_scripts(scripts)] for scripts in conversations]
        parts = [[piece for script in scripts for piece in self._with_cuts(script).pieces()] for scripts in joined]
        unique = list(dict.fromkeys(script for scripts in parts for script in scripts))
        encodings = self._tokenizer.encode_batch([script.text for script in unique], add_special_tokens=False)
        encoded = {script: self._align(script, encoding) for script, encoding in zip(unique, encodings, strict=True)}
        return [join_encoded([encoded[script] for script in scripts]) for scripts in parts]

    def has_special_text(self, text: str) -> bool:
        """Whether a text holds the text of a special token."""
        return any(token in text for token in self._control)

    def _with_cuts(self, script: Script) -> Script:
        """The script cut before each special token that splits its text, but not inside a span."""
        if script.markers is not None:
            return script
        edges = [edge for span in script.spans for edge in span]
        found = (marker.start() for marker in self._boundary.finditer(script.text))
        # An odd number of edges at or before a place, and none at it: the place is inside a span.
        free = (at for at in found if bisect_right(edges, at) % 2 == 0 or at in edges)
        return replace(script, cuts=tuple(sorted({*script.cuts, *free})))

    def _align(self, script: Script, encoding: "Encoding") -> EncodedScript:
        tokens = np.array(encoding.ids, dtype=np.int32)
        starts = np.fromiter((start for start, _ in encoding.offsets), dtype=np.int64, count=tokens.size)
        if script.markers is not None and np.isin(tokens, self._control_ids).sum() != len(self._known(script)):
            tokens, starts = self._encode_pieces(script)
        return _masked(script, tokens, starts)

    def _known(self, script: Script) -> list[Span]:
        """The markers that are one token of this tokenizer."""
        return [span for span in script.markers or () if script.text[span.start : span.stop] in self._control]

    def _encode_pieces(self, script: Script) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Tokens and their first characters, each stretch between markers encoded with special tokens off."""
        tokens: list[int] = []
        starts: list[int] = []
        at = 0
        for marker in [*self._known(script), Span(len(script.text), len(script.text))]:
            piece = self._encode_ordinary(script.text[at : marker.start])
            tokens += piece.ids
            starts += [at + start for start, _ in piece.offsets]
            if marker.start < marker.stop:
                tokens.append(self._control[script.text[marker.start : marker.stop]])
                starts.append(marker.start)
            at = marker.stop
        return np.array(tokens, np.int32), np.array(starts, np.int64)

    def _encode_ordinary(self, text: str) -> "Encoding":
        self._tokenizer.encode_special_tokens = True
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False
        if np.isin(encoding.ids, self._control_ids).any():
            raise InputError(
                f"text must not hold chat markers, which this tokenizer has no ordinary tokens for, got {text!r:.80}; "
                "remove them"
            )
        return encoding


def open_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder, without truncation and padding.

    Raises:
        ConfigError: the folder has no tokenizer.json, or a broken one.

    Example: `open_tokenizer(Path("qwen3")).token_to_id("<|im_end|>")` is 151645.
    """
    require(f"the tokenizer {folder}", "tokenizers")
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"a tokenizer folder holds tokenizer.json, none in {folder}; pass a Hugging Face tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises bare Exception for every broken file
        raise ConfigError(f"tokenizer.json must be readable, {file} is not ({error}); fetch it again") from error
    # A stored limit or padding would silently cut or extend trajectories.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _isolates(tokenizer: "Tokenizer", marker: str) -> bool:
    """Whether a text may be cut before a marker: both parts give the same tokens as the whole."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if marker in token.content]
    if [token.content for token in added] != [marker] or added[0].lstrip or added[0].single_word:
        return False
    # Some tokenizers write a space before a text, so a cut would add one.
    whole, first, second = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (f"a{marker}a", "a", f"{marker}a")
    )
    return bool(whole == first + second)


def _masked(script: Script, tokens: TokenIds, starts: npt.NDArray[np.int64]) -> EncodedScript:
    edges = np.array(script.spans, dtype=np.int64).reshape(-1)
    # Index among the edges start0, stop0, start1, ...: odd inside a span; span k has index 2k + 1.
    place = np.searchsorted(edges, starts, side="right")
    inside = np.arange(1, edges.size, 2)
    first, past = np.searchsorted(place, inside, side="left"), np.searchsorted(place, inside, side="right")
    return EncodedScript(tokens=tokens, loss_mask=place % 2 == 1, turn_ends=past[past > first].astype(np.int32))
