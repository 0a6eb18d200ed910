"""Encodes scripts to token ids and masks: a token is trained if its first character is in a trained span.

Uses the small `tokenizers` package, no model library.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.picture import PlacedPicture
from treering.data.rendering.script import TURN_END, TURN_START, Script, Span, join_scripts
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.types import LossMask, TokenIds

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedScript:
    """Token ids int32 [T], their mask bool [T], int32 [turns], one past each turn's last token, and pictures."""

    tokens: TokenIds
    loss_mask: LossMask
    turn_ends: npt.NDArray[np.int32]
    pictures: tuple[PlacedPicture, ...] = ()

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"


_NO_TURN = np.zeros(0, np.int32)


def join_encoded(parts: Sequence[EncodedScript]) -> EncodedScript:
    """Joins encoded scripts and shifts their turn ends.

    Example: 3 tokens without a turn and 2 tokens with turn end 2 join to 5 tokens with turn end 5.
    """
    starts = accumulate((part.tokens.size for part in parts), initial=0)
    turn_ends = [part.turn_ends + start for part, start in zip(parts, starts, strict=False) if part.turn_ends.size]
    return EncodedScript(
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        turn_ends=np.concatenate([_NO_TURN, *turn_ends]),
    )


_Piece: TypeAlias = tuple[Script, str | None]
"""A stretch of text, and the special token before it; see `Encoder._pieces`."""
_BATCH_CHARS = 1 << 22
"""Characters that are tokenized at one time: an encoding takes a hundred bytes a token."""


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
        self._is_control = np.zeros(self._tokenizer.get_vocab_size() + max([0, *added]) + 1, np.bool_)
        self._is_control[list(self._control.values())] = True
        isolating = [token for token in self._control if _isolates(self._tokenizer, token)]
        self._isolates_turns = TURN_START in isolating
        markers = "|".join(map(re.escape, isolating)) or r"(?!)"
        self._boundary, self._ends_in_marker = re.compile(markers), re.compile(f"({markers})$")
        self._inside = _without_first_space(self._tokenizer)
        self.begin = _begin(self._tokenizer)
        """What the tokenizer writes before a text, such as Llama's token that begins one; often nothing."""

    @property
    def missing_markers(self) -> list[str]:
        """The markers of the plain form that are not single tokens."""
        return [marker for marker in (TURN_START, TURN_END) if marker not in self._control]

    def encode(self, conversations: Sequence[Sequence[Script]]) -> list[EncodedScript]:
        """Encodes each list of scripts as the tokenizer encodes their concatenation, without added tokens.

        A script's cuts fall between tokens, and what follows one is encoded as inside of the text: tokenizers in the
        manner of SentencePiece write a space before a text. Text of special tokens outside its markers becomes
        ordinary tokens. Special tokens split a text anyway, so equal stretches between them are tokenized once.

        Raises:
            InputError: text outside the markers that the tokenizer cannot encode as ordinary tokens.
        """
        joined = conversations if self._isolates_turns else [[join_scripts(scripts)] for scripts in conversations]
        parts = [[piece for script in scripts for piece in self._pieces(script)] for scripts in joined]
        unique = list(dict.fromkeys(piece for pieces in parts for piece in pieces))
        encoded = {}
        for batch in _batches(unique):
            texts = [(before or "") + script.text for script, before in batch]
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                encoded[piece] = self._align(piece[0], *self._of_text(encoding, *piece))
        return [join_encoded([encoded[piece] for piece in pieces]) for pieces in parts]

    def _pieces(self, script: Script) -> "list[_Piece]":
        """The script cut at its cuts, each piece with the special token before it, "" if it goes on from other text.

        None stands for the text's begin, and for all pieces where the tokenizer writes no space before a text.
        """
        pieces = self._with_cuts(script).pieces()
        if self._inside is None:
            return [(piece, None) for piece in pieces]
        found: list[_Piece] = []
        for i, piece in enumerate(pieces):
            before = self._ends_in_marker.search(pieces[i - 1].text) if i else None
            is_begin = i == 0 or self._boundary.match(piece.text) is not None
            found.append((piece, None if is_begin else before.group() if before else ""))
        return found

    def _of_text(
        self, encoding: "Encoding", script: Script, before: str | None
    ) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """The tokens of a piece as they are inside of its text, and their first characters."""
        if self._inside is None and not script.spans:
            # Nothing asks where its tokens begin, and making a list of that takes longer than the ids.
            tokens = np.array(encoding.ids, np.int32)
            return tokens, np.zeros(tokens.size, np.int64)
        if before != "" or self._inside is None:
            skipped = 1 if before else 0
            starts = [start - len(before or "") for start, _ in encoding.offsets[skipped:]]
            return np.array(encoding.ids[skipped:], np.int32), np.array(starts, np.int64)
        # A special token begins the text anew.
        marker = self._boundary.search(script.text)
        at = len(script.text) if marker is None else marker.start()
        parts = (self._inside, script.text[:at], 0), (self._tokenizer, script.text[at:], at)
        found = [(one.encode(text, add_special_tokens=False), offset) for one, text, offset in parts]
        starts = [start + offset for each, offset in found for start, _ in each.offsets]
        return np.array([i for each, _ in found for i in each.ids], np.int32), np.array(starts, np.int64)

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if the tokenizer has no such token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

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

    def _align(self, script: Script, tokens: TokenIds, starts: npt.NDArray[np.int64]) -> EncodedScript:
        if script.markers is not None and np.count_nonzero(self._is_control[tokens]) != len(self._known(script)):
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
        if self._is_control[encoding.ids].any():
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


def _begin(tokenizer: "Tokenizer") -> TokenIds:
    """The special tokens that the tokenizer itself writes before a text, int32 [n]."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    num_special = next((i for i, is_special in enumerate(encoding.special_tokens_mask) if not is_special), 0)
    return np.array(encoding.ids[:num_special], np.int32)


def _without_first_space(tokenizer: "Tokenizer") -> "Tokenizer | None":
    """The tokenizer without the space that it writes before a text; None if it writes none."""
    from tokenizers import Tokenizer

    # Most tokenizers write none, and their tables are large.
    steps = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    if not any(step is not None and _without_space(json.loads(step.__getstate__()))[1] for step in steps):
        return None
    settings = json.loads(tokenizer.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        settings[name] = _without_space(settings[name])[0]
    return Tokenizer.from_str(json.dumps(settings))


def _without_space(step: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """The settings of a step of a tokenizer without the space before a text, and whether it wrote one."""
    kind = None if step is None else step["type"]
    if step is None or kind is None:
        return step, False
    if kind == "Prepend":
        return None, True
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        parts = [_without_space(part) for part in step[key]]
        return {**step, key: [part for part, _ in parts if part is not None]}, any(wrote for _, wrote in parts)
    if kind == "Metaspace" and step.get("prepend_scheme", "always") != "never":
        return {**step, "prepend_scheme": "never"}, True
    if kind == "ByteLevel" and step.get("add_prefix_space"):
        return {**step, "add_prefix_space": False}, True
    return step, False


def _batches(pieces: "Sequence[_Piece]") -> "Iterator[Sequence[_Piece]]":
    """The pieces in order, as many together as have `_BATCH_CHARS` characters."""
    first = num_chars = 0
    for number, (script, _) in enumerate(pieces):
        num_chars += len(script.text)
        if num_chars > _BATCH_CHARS and number > first:
            yield pieces[first:number]
            first, num_chars = number, len(script.text)
    yield pieces[first:]


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
    if not script.spans:
        return EncodedScript(tokens=tokens, loss_mask=np.zeros(tokens.size, np.bool_), turn_ends=_NO_TURN)
    # Tokens are in the order of their first characters.
    bounds = np.searchsorted(starts, np.array(script.spans))
    mask = np.zeros(tokens.size, np.bool_)
    for first, past in bounds.tolist():
        mask[first:past] = True
    turn_ends = bounds[bounds[:, 0] < bounds[:, 1], 1].astype(np.int32)
    return EncodedScript(tokens=tokens, loss_mask=mask, turn_ends=turn_ends)
