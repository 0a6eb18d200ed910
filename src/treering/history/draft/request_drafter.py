"""Adapter of a drafter for engines that name their rows by request ids and pass their buffers.

B rows of a step   L columns
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.errors import ConfigError, InputError
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.types import PromptId

_MANY_GROUPS = 1 << 14


class _Request(NamedTuple):
    prompt_id: PromptId
    row_id: int
    group: int
    num_prompt_tokens: int


class RequestDrafter:
    """Drafts for requests as vLLM, TRL or another engine has them: string ids, counts of any integer type, lists out.

    Requests are added once, with what they continue; each step names the requests in the batch, line by line. Requests
    may move between lines, pause for some steps and leave. The drafter learns which drafts were accepted from the
    tokens of the next step, so the engine does not have to report it.

    Args:
        drafter: a drafter with shape "chain". It belongs to this object.
        vocab_size: drafts end before a token that the model does not have; None where history cannot have one.

    Raises:
        ConfigError: the drafter's shape is "tree".

    Example:
        >>> import numpy as np
        >>> from treering.history.store.store import HistoryStore
        >>> store = HistoryStore()
        >>> store.add("q", [np.array([7, 8, 9], np.int32)] * 2, version=0)
        >>> store.publish()
        >>> requests = RequestDrafter(Drafter(store, shape="chain"))
        >>> requests.add("request-0", prompt_id="q", group="q", num_prompt_tokens=2)
        >>> tokens = np.array([[5, 6, 7, 0, 0]], np.int32)
        >>> requests.propose(["request-0"], tokens, np.array([3]), np.array([4]))
        [[8, 9]]
        >>> requests.remove(["request-0"])
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int | None = None) -> None:
        if drafter.shape != "chain":
            raise ConfigError(f'requests need a drafter of shape "chain", got "{drafter.shape}"; set shape="chain"')
        self.drafter = drafter
        """The drafter, with its costs, state and reliability."""
        self.num_drafted = self.num_accepted = 0
        """Draft tokens whose outcome is known, and how many of them were accepted."""
        self.vocab_size = vocab_size
        self._requests: dict[str, _Request] = {}
        self._groups: dict[Hashable, int] = {}
        self._num_groups = self._num_added = 0
        self.forget()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def forget(self) -> None:
        """Drop the latest drafts without learning from them; requests stay."""
        self._ids: list[str] = []
        self._rows: DraftRows | None = None
        self._latest: Drafts | None = None
        self._num_before = np.zeros(0, np.int64)

    def add(self, request_id: str, *, prompt_id: PromptId, group: Hashable, num_prompt_tokens: int) -> None:
        """Add a request before its first step, and again if what it continues has changed.

        Args:
            request_id: unique among the requests that were not removed.
            prompt_id: id of its prompt in the history, which need not know it.
            group: equal for siblings: requests with the same prompt, which learn from each other's tokens.
            num_prompt_tokens: prompt tokens of its context; of the original prompt where a rollout is continued.
        """
        if group not in self._groups:
            self._num_groups += 1
            self._groups[group] = self._num_groups
        self._requests[request_id] = _Request(prompt_id, self._num_added, self._groups[group], int(num_prompt_tokens))
        self._num_added += 1
        if request_id in self._ids:
            self.forget()

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended; ignore unknown ones."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
        # Later siblings still draft from requests that left, so group numbers are kept for a while.
        if len(self._groups) > max(_MANY_GROUPS, 2 * len(self._requests)):
            used = {request.group for request in self._requests.values()}
            self._groups = {group: number for group, number in self._groups.items() if number in used}

    def warm_up(self) -> None:
        """Compile the drafter; see `Drafter.warm_up`."""
        self.drafter.warm_up()

    def propose(
        self,
        request_ids: Sequence[str],
        tokens: Int32Array,
        num_tokens: NDArray[np.integer[Any]],
        max_drafts: NDArray[np.integer[Any]],
    ) -> list[list[int]]:
        """Learn from the outcome of the latest drafts, and draft for the requests of this step.

        Args:
            request_ids: B ids, in the order of the lines.
            tokens: int32 [>= B, L], prompt and rollout so far of each, from column 0 on; read in place.
            num_tokens: integers [>= B], tokens of each context.
            max_drafts: integers [>= B], most tokens to draft; 0 for no draft, as while a prompt is being prefilled.

        Returns:
            B lists of token ids, possibly empty.

        Raises:
            InputError: an id was not added, or counts are beyond the columns; see `DraftRows`.

        Example: a context of 5 6 7 whose history continues it with 8 9 gets [8, 9].
        """
        num_rows = len(request_ids)
        self._observe(request_ids, tokens, num_tokens)
        rows = self._rows_of(request_ids, tokens[:num_rows])
        rows.num_tokens[:] = num_tokens[:num_rows]
        rows.max_drafts[:] = max_drafts[:num_rows]
        self._latest = self.drafter.propose(rows)
        # The row's counts change in place with the next step.
        self._num_before = rows.num_tokens.copy()
        return self._as_lists(self._latest)

    def _observe(self, request_ids: Sequence[str], tokens: Int32Array, num_tokens: NDArray[np.integer[Any]]) -> None:
        """Teach the drafter which of its latest drafts were accepted; rows that left teach nothing."""
        latest, rows, self._latest = self._latest, self._rows, None
        if latest is None or rows is None or latest.tokens.size == 0:
            return
        if request_ids == self._ids:
            lines = np.arange(len(self._ids))
        else:
            line_of = {request_id: line for line, request_id in enumerate(request_ids)}
            lines = np.array([line_of.get(request_id, -1) for request_id in self._ids], np.int64)
        # Counts beyond the columns are refused when these rows are drafted for.
        counts = np.minimum(np.asarray(num_tokens, np.int64), tokens.shape[1])
        accepted, ended = _count_accepted(latest, self._num_before, lines, tokens, counts)
        self.drafter.observe(rows, accepted, ended)
        has_outcome = (accepted > 0) | ~ended
        self.num_drafted += int(np.diff(latest.offsets)[has_outcome].sum())
        self.num_accepted += int(accepted.sum())

    def _rows_of(self, request_ids: Sequence[str], tokens: Int32Array) -> DraftRows:
        """Return the rows of the step before if nothing moved, so that the drafter reads only their new tokens."""
        rows = self._rows
        if rows is not None and request_ids == self._ids and _is_same(rows.tokens, tokens):
            return rows
        # If the rest fails, the rows are unknown.
        self.forget()
        requests = [self._known(request_id) for request_id in request_ids]
        numbers = np.array([request[1:] for request in requests], np.int64).reshape(-1, 3).T.copy()
        self._ids = list(request_ids)
        self._rows = DraftRows(
            prompt_ids=[request.prompt_id for request in requests],
            row_ids=numbers[0],
            groups=numbers[1],
            num_prompt_tokens=numbers[2],
            tokens=tokens,
            num_tokens=np.zeros(len(requests), np.int64),
            max_drafts=np.zeros(len(requests), np.int64),
        )
        return self._rows

    def _known(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise InputError(f"request {request_id!r} was not added; add it with its prompt before its first step")
        return request

    def _as_lists(self, drafts: Drafts) -> list[list[int]]:
        tokens, ends = drafts.tokens.tolist(), drafts.offsets.tolist()
        lists = [tokens[ends[b] : ends[b + 1]] for b in range(len(ends) - 1)]
        if self.vocab_size is None or not tokens or max(tokens) < self.vocab_size:
            return lists
        return [before_unknown(draft, self.vocab_size) for draft in lists]


def before_unknown(draft: list[int], vocab_size: int | None) -> list[int]:
    """Return the tokens before the first one that is beyond the vocabulary; all if its size is None."""
    if vocab_size is None:
        return draft
    end = next((i for i, token in enumerate(draft) if token >= vocab_size), len(draft))
    return draft[:end]


def _is_same(first: Int32Array, second: Int32Array) -> bool:
    return first.__array_interface__ == second.__array_interface__


def _count_accepted(
    latest: Drafts, num_before: Int64Array, lines: Int64Array, tokens: Int32Array, num_tokens: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Count the tokens of each draft that the row continued with.

    Args:
        latest: the drafts, chains.
        num_before: int64 [B], tokens of the contexts that were drafted for.
        lines: int64 [B], present line of each row; -1 for a row that left.
        tokens: int32 [>= B', L], present contexts.
        num_tokens: int64 [>= B'], tokens of each.

    Returns:
        int64 [B]; and bool [B], true where all new tokens were drafted, so that the outcome of later ones is unknown.
    """
    num_new = np.where(lines >= 0, num_tokens[lines] - num_before, 0) if num_tokens.size else np.zeros_like(lines)
    offsets = latest.offsets
    owner = np.repeat(np.arange(lines.size), np.diff(offsets))
    depth = np.arange(owner.size) - offsets[owner]
    wrong = depth >= num_new[owner]
    is_new = np.flatnonzero(~wrong)
    rows, at = owner[is_new], (num_before[owner] + depth)[is_new]
    wrong[is_new] = tokens[lines[rows], at] != latest.tokens[is_new]
    # A token is accepted if no token of its row is wrong up to it.
    num_wrong = np.concatenate([[0], np.cumsum(wrong)])
    agrees = num_wrong[1:] == num_wrong[offsets[owner]]
    accepted = np.bincount(owner[agrees], minlength=lines.size)
    return accepted, accepted >= num_new
