"""Drafts of all rows in one compiled call without the interpreter lock.

Knows estimates: each row takes the source whose first token is likeliest to be accepted, and goes on while the whole
draft is likely enough. Knows nothing of prompts, stores and records.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from treering.history.acceptance import is_retried
from treering.history.cursor import Cursor, Limits, Rows, Texts, find, new_cursor, step

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


class Table(NamedTuple):
    """What is known of every cell; see `Acceptance`."""

    estimate: Float64Array  # [cells]
    num_tried: Float64Array  # [cells]
    num_refused: Float64Array  # [cells], changed in place


class Output(NamedTuple):
    """Drafts of all rows, one after another; see `Drafts`."""

    offsets: Int64Array  # [B + 1]
    tokens: Int32Array  # [B * max_draft]
    parents: Int32Array  # [B * max_draft]
    acceptance: NDArray[np.float32]  # [B * max_draft]
    cells: Int32Array  # [B * max_draft]


@njit
def _best_source(rows: Rows, texts: Texts, table: Table, b: int, cursor: Cursor) -> tuple[int, int, int]:
    """(source, token, cell) of the likeliest first token, of equals the first source; source -1 where none matches."""
    best_source, best_token, best_cell = -1, -1, -1
    for source in range(cursor.length.size):
        if cursor.length[source] == 0:
            continue
        token, cell = step(rows, texts, b, source, cursor)
        if best_source == -1 or table.estimate[cell] > table.estimate[best_cell]:
            best_source, best_token, best_cell = source, token, cell
    return best_source, best_token, best_cell


@njit
def _draft(
    rows: Rows, texts: Texts, limits: Limits, table: Table, b: int, cursor: Cursor, output: Output, num_out: int
) -> int:
    """Writes the draft of row b behind `num_out` tokens of the rows before; returns how many there are now."""
    source, token, cell = _best_source(rows, texts, table, b, cursor)
    if source == -1:
        return num_out
    most = min(limits.max_draft, rows.max_drafts[b])
    chance = table.estimate[cell]
    if chance < limits.min_acceptance and not is_retried(cell, table.num_tried, table.num_refused):
        return num_out
    num_drafted = 0
    while True:
        at = num_out + num_drafted
        output.tokens[at], output.parents[at] = token, num_drafted - 1
        output.acceptance[at], output.cells[at] = table.estimate[cell], cell
        num_drafted += 1
        if num_drafted == most or cursor.first[source] == cursor.end[source]:
            return num_out + num_drafted
        token, cell = step(rows, texts, b, source, cursor)
        chance *= table.estimate[cell]
        if chance < limits.min_acceptance:
            return num_out + num_drafted


@njit
def _first_bad_row(rows: Rows) -> int:
    for b in range(rows.num_tokens.size):
        fits = 0 <= rows.num_prompt[b] <= rows.num_tokens[b] <= rows.tokens.shape[1]
        if not fits or rows.max_drafts[b] < 0:
            return b
    return -1


def _compile(stamp: int) -> Callable[..., int]:
    """The compiled call; `stamp` names the sources that it was compiled from.

    Numba finds a cached result by the caller's own file, so a change in a file that it calls into would go unseen. What
    a function closes over belongs to the key as well; that is all the stamp is for, and why only this function is
    cached.
    """

    @njit(cache=True, nogil=True)
    def propose(
        tokens: Int32Array,
        num_tokens: Int64Array,
        num_prompt: Int64Array,
        groups: Int64Array,
        max_drafts: Int64Array,
        slots: Int64Array,
        spans: Int64Array,
        text: Int32Array,
        suffixes: Int32Array,
        uses: NDArray[np.bool_],
        max_draft: int,
        max_match: int,
        max_window: int,
        min_acceptance: float,
        estimate: Float64Array,
        num_tried: Float64Array,
        num_refused: Float64Array,
        out_offsets: Int64Array,
        out_tokens: Int32Array,
        out_parents: Int32Array,
        out_acceptance: NDArray[np.float32],
        out_cells: Int32Array,
    ) -> int:
        """Fills the output; returns -1, or the first row whose counts contradict, with nothing changed.

        The arguments are the fields of `Rows`, `Texts`, `Limits`, `Table` and `Output`, flat because the compiled call
        unpacks arrays much faster than tuples of them.
        """
        assert stamp >= 0
        rows = Rows(tokens, num_tokens, num_prompt, groups, max_drafts)
        texts = Texts(slots, spans, text, suffixes)
        limits = Limits(uses, max_draft, max_match, max_window, min_acceptance)
        table = Table(estimate, num_tried, num_refused)
        output = Output(out_offsets, out_tokens, out_parents, out_acceptance, out_cells)
        bad_row: int = _first_bad_row(rows)
        if bad_row >= 0:
            return bad_row
        cursor = new_cursor()
        num_out = 0
        output.offsets[0] = 0
        for b in range(num_tokens.size):
            if min(max_draft, max_drafts[b]) > 0:
                find(rows, texts, limits, b, cursor)
                num_out = _draft(rows, texts, limits, table, b, cursor, output, num_out)
            output.offsets[b + 1] = num_out
        return -1

    compiled: Callable[..., int] = propose
    return compiled


def _stamp_of(folder: Path) -> int:
    """A number that changes with any source file of a folder."""
    stamp = 0
    for file in sorted(folder.glob("*.py")):
        stamp = zlib.crc32(file.read_bytes(), stamp)
    return stamp


propose = _compile(_stamp_of(Path(__file__).parent))
