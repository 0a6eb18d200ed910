"""Scripts, which are texts with the spans that the policy wrote, and their encoding to token ids and masks.

A token is trained if its first character is in a trained span. The module needs only the small `tokenizers` package.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.image import PlacedImage
from treering.data.trajectory import Message, ToolCall
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.types import LossMask, TokenIds

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THOUGHT_START, THOUGHT_END = "<think>", "</think>"


class Span(NamedTuple):
    """Characters `start` to `stop` (exclusive) of a script's text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Text with its trained spans, one per assistant turn."""

    text: str
    """The text to tokenize."""
    spans: tuple[Span, ...] = ()
    """Ascending, disjoint and not empty."""
    markers: tuple[Span, ...] | None = None
    """Spans of special tokens, whose text is encoded as ordinary text elsewhere. None allows them anywhere, as in the
    output of a chat template."""
    cuts: tuple[int, ...] = ()
    """Characters at which a token must begin, because inference encodes a prompt alone; ascending. Only in text without
    markers, and not inside a span."""

    def pieces(self) -> "list[Script]":
        """Split the script at its cuts."""
        if not self.cuts:
            return [self]
        found = []
        for start, stop in pairwise([0, *self.cuts, len(self.text)]):
            if start < stop:
                spans = tuple(Span(a - start, b - start) for a, b in self.spans if start <= a < stop)
                found.append(Script(text=self.text[start:stop], spans=spans, markers=self.markers))
        return found


def message_script(message: Message) -> Script:
    r"""Return a message in the plain chat form; an assistant's span includes its text and the end marker.

    The form is `<|im_start|>{role}\n{thought}{content}{tool calls}<|im_end|>\n`, with a thought as
    `<think>\n{reasoning}\n</think>\n\n` and a call a line as `{"name":"search","arguments":{"query":"Zürich"}}`.

    Example: an assistant's "Hi" is the text `<|im_start|>assistant\nHi<|im_end|>\n` with the span (22, 34).
    """
    head, thought = f"{message.role}\n", []
    if message.reasoning:
        thought = [head, THOUGHT_START, f"\n{message.reasoning.strip()}\n", THOUGHT_END]
    begin = "\n\n" if thought else head
    calls = "\n".join(
        f'{{"name":{json.dumps(call.name, ensure_ascii=False)},"arguments":{_arguments_text(call)}}}'
        for call in message.tool_calls
    )
    body = f"{begin}{message.content or ''}{calls}"
    parts = [TURN_START, *thought, body, TURN_END, "\n"]
    trained = Span(len(TURN_START) + len(head), sum(map(len, parts)) - 1)
    return _marked(parts, (trained,) if message.is_trained else ())


def turn_opening() -> Script:
    """Return the text before an assistant's turn in the plain form."""
    return _marked([TURN_START, "assistant\n"], ())


def raw_script(messages: Sequence[Message]) -> Script:
    """Return the concatenated contents without markers; each assistant message with text is a span.

    Example: user "2+2=" and assistant "4" are the text "2+2=4" with the span (4, 5).
    """
    texts = [(message.content or "", message.is_trained) for message in messages]
    return join_scripts(
        Script(text=text, spans=(Span(0, len(text)),) if is_trained and text else ()) for text, is_trained in texts
    )


def join_scripts(scripts: Iterable[Script]) -> Script:
    """Join scripts and shift their spans; special tokens are allowed anywhere if one script allows that."""
    texts: list[str] = []
    spans: list[Span] = []
    markers: list[Span] | None = []
    cuts: list[int] = []
    offset = 0
    for script in scripts:
        texts.append(script.text)
        spans.extend(_shifted(script.spans, offset))
        markers = None if markers is None or script.markers is None else [*markers, *_shifted(script.markers, offset)]
        cuts.extend(cut + offset for cut in script.cuts)
        offset += len(script.text)
    return Script(
        text="".join(texts),
        spans=tuple(spans),
        markers=None if markers is None else tuple(markers),
        cuts=tuple(cuts),
    )


def _marked(parts: Sequence[str], spans: tuple[Span, ...]) -> Script:
    """Return a script of texts, each after a marker."""
    ends = accumulate(map(len, parts), initial=0)
    return Script(text="".join(parts), spans=spans, markers=tuple(starmap(Span, pairwise(ends)))[::2])


def _shifted(spans: Iterable[Span], offset: int) -> Iterator[Span]:
    return (Span(span.start + offset, span.stop + offset) for span in spans)


def _arguments_text(call: ToolCall) -> str:
    """Return a JSON object as the model wrote it; other text, such as broken JSON, becomes a JSON string."""
    if isinstance(call.given, str) and is_object_text(call.given):
        return call.given
    arguments = call.given if isinstance(call.given, str) else dict(call.given)
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def is_object_text(text: str) -> bool:
    """Return whether a text is a JSON object for Python, which allows NaN and infinities.

    Example: `{"x": NaN}` is one; `[1]` and `{"x": ` are not.
    """
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedScript:
    """Token ids, int32 [T], their mask, bool [T], the index after each turn, int32 [turns], and images."""

    tokens: TokenIds
    loss_mask: LossMask
    turn_ends: npt.NDArray[np.int32]
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"


NO_TURN = np.zeros(0, np.int32)


def join_encoded(parts: Sequence[EncodedScript]) -> EncodedScript:
    """Join encoded scripts and shift their turn ends."""
    starts = accumulate((part.tokens.size for part in parts), initial=0)
    turn_ends = [part.turn_ends + start for part, start in zip(parts, starts, strict=False) if part.turn_ends.size]
    return EncodedScript(
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        turn_ends=np.concatenate([NO_TURN, *turn_ends]),
    )


_Piece: TypeAlias = tuple[Script, str | None]
"""A piece of text and the special token before it; see `Encoder._pieces`."""
_BATCH_CHARS = 1 << 22
"""Number of characters that are tokenized at once, since an encoding takes about a hundred bytes per token."""


class Encoder:
    """A tokenizer folder, opened once."""

    def __init__(self, folder: Path) -> None:
        """Open `folder/tokenizer.json`, or raise ConfigError if it is missing or broken."""
        self._tokenizer = open_tokenizer(folder)
        # A marker may be an added token that is not special, and data must not write it either.
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {
            token.content: i for i, token in added.items() if token.special or token.content in (TURN_START, TURN_END)
        }
        self._is_control = np.zeros(self._tokenizer.get_vocab_size() + max([0, *added]) + 1, np.bool_)
        self._is_control[list(self._control.values())] = True
        self._added = frozenset(added)
        isolating = [token for token in self._control if _isolates(self._tokenizer, token)]
        self._isolates_turns = TURN_START in isolating
        markers = "|".join(map(re.escape, isolating)) or r"(?!)"
        self._boundary, self._ends_in_marker = re.compile(markers), re.compile(f"({markers})$")
        self._inside = _without_first_space(self._tokenizer)
        self.begin = begin_of(self._tokenizer)
        """Ids that the tokenizer adds before a text, such as Llama's begin-of-text token; often empty."""

    @property
    def begin_text(self) -> str:
        """Text of `begin`."""
        return "".join(str(self._tokenizer.id_to_token(token)) for token in self.begin.tolist())

    @property
    def missing_markers(self) -> list[str]:
        """Markers of the plain form that are not single tokens."""
        return [marker for marker in (TURN_START, TURN_END) if marker not in self._control]

    def encode(self, conversations: Sequence[Sequence[Script]]) -> list[EncodedScript]:
        """Encode each list of scripts as the tokenizer encodes their concatenation, without added tokens.

        A token begins at each cut of a script, and text after a cut is encoded without the space that tokenizers like
        SentencePiece add at the start of a text. Text of special tokens outside the markers becomes ordinary tokens.
        Special tokens split a text, so equal pieces between them are tokenized once.

        Raises:
            InputError: the tokenizer cannot encode text outside the markers as ordinary tokens.
        """
        joined = conversations if self._isolates_turns else [[join_scripts(scripts)] for scripts in conversations]
        parts = [[piece for script in scripts for piece in self._pieces(script)] for scripts in joined]
        unique = list(dict.fromkeys(piece for pieces in parts for piece in pieces))
        encoded = {}
        for batch in _batches(unique):
            texts = [(before or "") + script.text for script, before in batch]
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                script, (tokens, starts) = piece[0], self._of_text(encoding, *piece)
                num_markers = len(self._known(script))
                if script.markers is not None and np.count_nonzero(self._is_control[tokens]) != num_markers:
                    tokens, starts = self._encode_pieces(script)
                encoded[piece] = _masked(script, tokens, starts)
        return [join_encoded([encoded[piece] for piece in pieces]) for pieces in parts]

    def _pieces(self, script: Script) -> "list[_Piece]":
        """Split the script at its cuts; each piece has the special token before it, or "" after other text.

        None marks the start of the text, and all pieces if the tokenizer does not add a space before a text.
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
        """Return the tokens of a piece as inside its text, and their first characters."""
        if self._inside is None and not script.spans:
            # The starts are not needed, and listing them takes longer than the ids.
            tokens = np.array(encoding.ids, np.int32)
            return tokens, np.zeros(tokens.size, np.int64)
        if before != "" or self._inside is None:
            skipped = 1 if before else 0
            starts = [start - len(before or "") for start, _ in encoding.offsets[skipped:]]
            return np.array(encoding.ids[skipped:], np.int32), np.array(starts, np.int64)
        # After a special token the tokenizer treats the text as a new one.
        marker = self._boundary.search(script.text)
        at = len(script.text) if marker is None else marker.start()
        parts = (self._inside, script.text[:at], 0), (self._tokenizer, script.text[at:], at)
        found = [(one.encode(text, add_special_tokens=False), offset) for one, text, offset in parts]
        starts = [start + offset for each, offset in found for start, _ in each.offsets]
        return np.array([i for each, _ in found for i in each.ids], np.int32), np.array(starts, np.int64)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the tokenizer has no such token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def end_of(self, text: str, *, is_special: bool) -> int | None:
        """Return the last token of a text if it is an added or special token; None for ordinary text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        known = self._control.values() if is_special else self._added
        return int(ids[-1]) if ids and ids[-1] in known else None

    def text_of(self, token_id: int) -> str:
        """Return the text of a token."""
        return str(self._tokenizer.id_to_token(token_id))

    def special_ids(self, pattern: re.Pattern[str]) -> list[int]:
        """Return the ids of the special tokens whose text matches a pattern."""
        return [token_id for text, token_id in self._control.items() if pattern.search(text)]

    def has_special_text(self, text: str) -> bool:
        """Return whether a text contains the text of a special token."""
        return any(token in text for token in self._control)

    def _with_cuts(self, script: Script) -> Script:
        """Add a cut before each special token that splits the text outside a span."""
        if script.markers is not None:
            return script
        edges = [edge for span in script.spans for edge in span]
        found = (marker.start() for marker in self._boundary.finditer(script.text))
        # A position after an odd number of edges, and not at one, is inside a span.
        free = (at for at in found if bisect_right(edges, at) % 2 == 0 or at in edges)
        return replace(script, cuts=tuple(sorted({*script.cuts, *free})))

    def _known(self, script: Script) -> list[Span]:
        """Return the markers that are single tokens of this tokenizer."""
        return [span for span in script.markers or () if script.text[span.start : span.stop] in self._control]

    def _encode_pieces(self, script: Script) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return tokens and their first characters; text between markers is encoded with special tokens off."""
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
    """Return the tokenizer of a Hugging Face folder, without truncation and padding.

    Raises:
        ConfigError: tokenizer.json is missing or broken.

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
    # Stored truncation or padding would silently change trajectories.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def missing_begin(tokens: TokenIds, begin: TokenIds) -> TokenIds:
    """Return the begin tokens of a tokenizer; none if the tokens begin with them."""
    return begin[:0] if np.array_equal(tokens[: begin.size], begin) else begin


def begin_of(tokenizer: "Tokenizer") -> TokenIds:
    """Return the special tokens that the tokenizer adds before a text, int32 [n]."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    num_special = next((i for i, is_special in enumerate(encoding.special_tokens_mask) if not is_special), 0)
    return np.array(encoding.ids[:num_special], np.int32)


def _without_first_space(tokenizer: "Tokenizer") -> "Tokenizer | None":
    """Return the tokenizer without the space that it adds before a text; None if it does not add one."""
    from tokenizers import Tokenizer

    # Most tokenizers do not add a space, and copies of their tables are large.
    steps = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    if not any(step is not None and _without_space(json.loads(step.__getstate__()))[1] for step in steps):
        return None
    settings = json.loads(tokenizer.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        settings[name] = _without_space(settings[name])[0]
    return Tokenizer.from_str(json.dumps(settings))


def _without_space(step: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """Return a tokenizer step's settings without the space before a text, and whether the step added one."""
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
    """Yield the pieces in order, in batches of about `_BATCH_CHARS` characters."""
    first = num_chars = 0
    for number, (script, _) in enumerate(pieces):
        num_chars += len(script.text)
        if num_chars > _BATCH_CHARS and number > first:
            yield pieces[first:number]
            first, num_chars = number, len(script.text)
    yield pieces[first:]


def _isolates(tokenizer: "Tokenizer", marker: str) -> bool:
    """Return whether a text that is split before a marker has the same tokens as the whole."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if marker in token.content]
    if [token.content for token in added] != [marker] or added[0].lstrip or added[0].single_word:
        return False
    # Some tokenizers add a space before a text, and so after a split.
    whole, first, second = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (f"a{marker}a", "a", f"{marker}a")
    )
    return bool(whole == first + second)


def _masked(script: Script, tokens: TokenIds, starts: npt.NDArray[np.int64]) -> EncodedScript:
    if not script.spans:
        return EncodedScript(tokens=tokens, loss_mask=np.zeros(tokens.size, np.bool_), turn_ends=NO_TURN)
    # Tokens are sorted by their first characters.
    bounds = np.searchsorted(starts, np.array(script.spans))
    mask = np.zeros(tokens.size, np.bool_)
    for first, past in bounds.tolist():
        mask[first:past] = True
    turn_ends = bounds[bounds[:, 0] < bounds[:, 1], 1].astype(np.int32)
    return EncodedScript(tokens=tokens, loss_mask=mask, turn_ends=turn_ends)
