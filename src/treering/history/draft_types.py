"""The arrays that an engine and a drafter exchange in a step: rows in, drafts out.

B rows   L columns   D drafted tokens of all rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treering.arrays import Float32Array, Int32Array, Int64Array
from treering.errors import InputError
from treering.types import PromptId

_NAMES = (str, int, np.integer)
_OPTIONAL = ("row_ids", "leaders")
_COUNTS = ("groups", "num_tokens", "num_prompt_tokens", "max_drafts", *_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRows:
    """Rows of one engine step; arrays are read in place, so they may be views of the engine's own.

    Attributes:
        prompt_ids: B ids; history need not know them.
        groups: int64 [B]; rows with equal numbers are siblings. A group keeps its number while any of its rows runs.
        tokens: int32 [B, L], row b's prompt and rollout so far from column 0 on; later columns are not read. Fastest if
            rows are contiguous.
        num_tokens: int64 [B], tokens of each context.
        num_prompt_tokens: int64 [B], prompt tokens among them.
        max_drafts: int64 [B], most tokens that each row's draft may have; 0 for no draft.
        row_ids: int64 [B] or None, a number that a running rollout keeps and no other ever has. Without it, a rollout
            is assumed to stay in its line while the line's prompt, group and newest tokens match.
        leaders: int64 [B] or None, the row whose draft each row is verified with: itself, or an earlier row with the
            same tokens that is its own leader. Only leaders get drafts. None: all rows are their own leaders.

    Example: prompt [5, 6] and rollout [7] in a buffer of 4 columns are tokens [[5, 6, 7, 0]], num_tokens [3] and
    num_prompt_tokens [2].
    """

    prompt_ids: Sequence[PromptId]
    groups: Int64Array
    tokens: Int32Array
    num_tokens: Int64Array
    num_prompt_tokens: Int64Array
    max_drafts: Int64Array
    row_ids: Int64Array | None = None
    leaders: Int64Array | None = None

    def __post_init__(self) -> None:
        shape = (len(self.prompt_ids),)
        if not all(issubclass(kind, _NAMES) for kind in set(map(type, self.prompt_ids))):
            raise InputError(f"prompt_ids must be strings or integers, got {self.prompt_ids!r}; convert them")
        if _kind_of(self.tokens) != np.int32 or self.tokens.ndim != 2 or self.tokens.shape[0] != shape[0]:
            raise InputError(
                f"tokens of {shape[0]} rows must be int32 of shape ({shape[0]}, L), got {_kind_of(self.tokens)} of "
                f"shape {np.shape(self.tokens)}; pass the buffer's lines of these rows"
            )
        for name in _COUNTS:
            values = getattr(self, name)
            if name in _OPTIONAL and values is None:
                continue
            if _kind_of(values) != np.int64 or values.shape != shape:
                raise InputError(
                    f"{name} must be int64 of shape {shape}, one entry per prompt_id, got {_kind_of(values)} of "
                    f"shape {np.shape(values)}; convert it"
                )


def check_counts(rows: DraftRows) -> None:
    """Check that contexts begin and end within their lines.

    Raises:
        InputError: counts of a row contradict each other; names the first such row.
    """
    num_prompt, num_tokens = rows.num_prompt_tokens, rows.num_tokens
    fits = (num_prompt >= 0) & (num_prompt <= num_tokens) & (num_tokens <= rows.tokens.shape[1])
    if not fits.all():
        raise InputError(contradiction(rows, int(fits.argmin())))


def contradiction(rows: DraftRows, b: int) -> str:
    """Return the message for a row whose counts contradict each other."""
    return (
        f"every row needs 0 <= num_prompt_tokens <= num_tokens <= {rows.tokens.shape[1]} columns and max_drafts >= 0, "
        f"got {rows.num_prompt_tokens[b]}, {rows.num_tokens[b]} and {rows.max_drafts[b]} in row {b}; correct the counts"
        + ("" if rows.leaders is None else f", or its leader {rows.leaders[b]}, an earlier row with as many tokens")
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Drafted tokens of all rows, one row after another; row b has the tokens `offsets[b]:offsets[b + 1]`.

    Attributes:
        tokens: int32 [D].
        offsets: int64 [B + 1].
        parents: int32 [D], index within the row's draft of the previous token; -1 is the context's last token. A parent
            precedes its children, its likeliest child follows it directly, and children of one parent differ.
        acceptance: float32 [D], estimated probability that the token is accepted, given that its parents are.

    Example: row 0 may continue with 8 9 or with 7, and row 1 has no draft: tokens [8, 9, 7], offsets [0, 3, 3], parents
    [-1, 0, -1].
    """

    tokens: Int32Array
    offsets: Int64Array
    parents: Int32Array
    acceptance: Float32Array

    def __post_init__(self) -> None:
        assert self.tokens.size == self.parents.size == self.acceptance.size == self.offsets[-1]


def _kind_of(values: object) -> np.dtype[Any] | str:
    return values.dtype if isinstance(values, np.ndarray) else type(values).__name__


def no_drafts(num_rows: int) -> Drafts:
    """Return empty drafts for `num_rows` rows."""
    nothing = np.zeros(0, np.int32)
    return Drafts(
        tokens=nothing, offsets=np.zeros(num_rows + 1, np.int64), parents=nothing, acceptance=np.zeros(0, np.float32)
    )
