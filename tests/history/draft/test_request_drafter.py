"""RequestDrafter drafts like a Drafter inside an embedded engine, however its rows move."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.reference import Row, draft_rows, drafted, store_of
from treering.errors import ConfigError, InputError
from treering.history.draft.drafter import Drafter
from treering.history.draft.request_drafter import RequestDrafter

HISTORY = {
    "a": {0: [[1, 2, 3, 4, 1, 2, 5, 6, 7, 8], [1, 2, 3, 4, 4, 4, 1, 2, 3, 9]]},
    "b": {0: [[2, 2, 3, 1, 1, 2, 5, 6, 1, 1], [3, 3, 3, 1, 2, 3, 4, 1, 2, 5]]},
}
PROMPTS = {"a": (5, 6), "b": (6, 6, 5), "new": (7,)}
NUM_LINES, NUM_COLUMNS = 6, 40


@dataclass
class Request:
    """Rollout that continues with fixed tokens whatever is drafted."""

    name: str
    number: int
    prompt_id: str
    truth: list[int]
    num_done: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*PROMPTS[self.prompt_id], *self.truth[: self.num_done])


@dataclass
class Step:
    """Changes to a persistent batch in one step."""

    sits_out: int
    leaves: int
    joins: int
    swaps: bool
    prefill: bool


STEPS = st.lists(
    st.builds(
        Step,
        sits_out=st.integers(0, 1),
        leaves=st.integers(0, 1),
        joins=st.integers(0, 2),
        swaps=st.booleans(),
        prefill=st.booleans(),
    ),
    min_size=3,
    max_size=14,
)


class Engine:
    """Engine whose lines move as in vLLM's persistent batch and whose buffers keep garbage of earlier rows."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lines: list[Request] = []
        self.waiting: list[Request] = []
        self.finished: list[str] = []
        self.num_made = 0
        self.tokens = self.rng.integers(0, 9, (NUM_LINES, NUM_COLUMNS)).astype(np.int32)

    def turn_over(self, step: Step) -> list[Request]:
        """Change the batch and return the new requests."""
        self.finished = [self._take_out().name for _ in range(min(step.leaves, len(self.lines)))]
        back = self.waiting
        self.waiting = [self._take_out() for _ in range(min(step.sits_out, len(self.lines)))]
        self.lines += back
        new = [self._make() for _ in range(min(step.joins, NUM_LINES - len(self.lines) - len(self.waiting)))]
        self.lines += new
        if step.swaps and len(self.lines) > 1:
            self.lines[0], self.lines[-1] = self.lines[-1], self.lines[0]
        return new

    def _take_out(self) -> Request:
        """Remove a random line and move the last one into its place."""
        hole = int(self.rng.integers(len(self.lines)))
        out, last = self.lines[hole], self.lines.pop()
        if out is not last:
            self.lines[hole] = last
        return out

    def _make(self) -> Request:
        prompt_id = ["a", "b", "new"][int(self.rng.integers(3))]
        known = HISTORY.get(prompt_id, {0: [[1, 2, 3]]})[0]
        truth = [int(t) if self.rng.random() < 0.8 else 8 for t in known[int(self.rng.integers(len(known)))] * 3]
        self.num_made += 1
        return Request(f"{self.num_made - 1}-x", self.num_made - 1, prompt_id, truth[:30])

    def sample(self) -> list[tuple[int, bool]]:
        """Extend each line by its accepted tokens and one more; return both counts of each line."""
        outcomes = []
        for request in self.lines:
            rest = request.truth[request.num_done :]
            agreed = [drafted == token for drafted, token in zip(request.draft, rest, strict=False)]
            num = agreed.index(False) if False in agreed else len(agreed)
            num_new = min(num + 1, len(rest))
            request.num_done += num_new
            outcomes.append((num, num_new))
        return outcomes

    def show(self) -> None:
        """Write the lines into the buffer."""
        for line, request in enumerate(self.lines):
            self.tokens[line, : len(request.tokens)] = request.tokens


@settings(max_examples=60)
@given(STEPS, st.integers(0, 2**32))
def test_drafts_equal_those_of_a_fully_informed_drafter(steps: list[Step], seed: int) -> None:
    store = store_of(HISTORY)
    options: dict[str, Any] = {"shape": "chain", "min_acceptance": 0.01, "max_draft": 6}
    guest, plain = RequestDrafter(Drafter(store, **options)), Drafter(store, **options)
    engine = Engine(seed)
    before: tuple[Any, list[Request], list[int]] | None = None
    for step in steps:
        # The previous step's lines sample, then some leave. Lines that sat out verified nothing.
        ran = list(engine.lines)
        outcomes = dict(zip([request.name for request in ran], engine.sample(), strict=True))
        new = engine.turn_over(step)
        guest.remove(engine.finished)
        for request in new:
            guest.add(
                request.name,
                prompt_id=request.prompt_id,
                group=request.prompt_id,
                num_prompt_tokens=len(PROMPTS[request.prompt_id]),
            )
        stays = {request.name for request in engine.lines}
        if before is not None:
            _observe(plain, *before, {name: outcome for name, outcome in outcomes.items() if name in stays})
        engine.show()
        limits = [0 if request in new and step.prefill else 6 for request in engine.lines]
        counts = np.zeros(NUM_LINES, np.int32)
        counts[: len(engine.lines)] = [len(request.tokens) for request in engine.lines]
        lists = guest.propose([r.name for r in engine.lines], engine.tokens, counts, np.array(limits, np.int32))
        rows = draft_rows(
            [
                Row(
                    prompt_id=r.prompt_id,
                    prompt=PROMPTS[r.prompt_id],
                    rollout=tuple(r.truth[: r.num_done]),
                    group=7 + ["new", "b", "a"].index(r.prompt_id),
                    max_drafts=limit,
                )
                for r, limit in zip(engine.lines, limits, strict=True)
            ],
            row_ids=[request.number for request in engine.lines],
        )
        drafts = plain.propose(rows)
        assert lists == drafted(drafts)
        before = rows, list(engine.lines), [len(draft) for draft in lists]
        for request, draft in zip(engine.lines, lists, strict=True):
            request.draft = draft
    for name, values in plain.state().items():
        np.testing.assert_array_equal(guest.drafter.state()[name], values, strict=True)


def _observe(
    plain: Drafter, rows: Any, requests: list[Request], sizes: list[int], outcomes: dict[str, tuple[int, int]]
) -> None:
    """Report each row's outcome to the drafter; a row that left, or whose new tokens all agreed, was cut off."""
    known = [outcomes.get(request.name, (0, 0)) for request in requests]
    accepted = np.array([min(num, num_new) for num, num_new in known], np.int64)
    was_cut = np.array([num >= num_new for num, num_new in known], np.bool_)
    assert (accepted <= sizes).all()
    plain.observe(rows, accepted, was_cut)


def guest_of(*rollouts: list[int], **options: Any) -> RequestDrafter:
    return RequestDrafter(Drafter(store_of({"q": {0: rollouts}}), shape="chain", min_acceptance=1e-6), **options)


def add(guest: RequestDrafter, *names: str) -> None:
    for name in names:
        guest.add(name, prompt_id="q", group="q", num_prompt_tokens=1)


def test_drafts_end_before_a_token_that_the_model_does_not_have() -> None:
    guest = guest_of([1, 2, 3, 99, 4], vocab_size=50)
    add(guest, "r")
    assert guest.propose(["r"], np.array([[5, 1]], np.int32), np.array([2]), np.array([9])) == [[2, 3]]


def test_a_trimmed_draft_teaches_only_what_was_seen() -> None:
    guest = guest_of([1, 2, 3, 4, 5])
    add(guest, "r")
    tokens = np.zeros((1, 9), np.int32)
    tokens[0, :2] = 5, 1
    assert guest.propose(["r"], tokens, np.array([2]), np.array([4])) == [[2, 3, 4, 5]]
    # The engine verified two of the four tokens: it accepted the first and sampled another third token.
    tokens[0, 2:4] = 2, 3
    guest.propose(["r"], tokens, np.array([4]), np.array([0]))
    assert (guest.num_drafted, guest.num_accepted) == (4, 2)
    assert sum(bin.num_drafted for bin in guest.drafter.reliability()) == 2


def test_lines_that_move_within_the_same_set_keep_their_own_outcome() -> None:
    guest = guest_of([1, 2, 3])
    add(guest, "r", "s")
    tokens = np.array([[5, 1, 0, 0], [5, 1, 0, 0]], np.int32)
    limits = np.array([3, 3])
    assert guest.propose(["r", "s"], tokens, np.array([2, 2]), limits) == [[2, 3], [2, 3]]
    moved = np.array([[5, 1, 9, 0], [5, 1, 2, 3]], np.int32)
    guest.propose(["s", "r"], moved, np.array([3, 4]), limits)
    assert (guest.num_drafted, guest.num_accepted) == (4, 2)


def test_removed_requests_are_forgotten_and_refused() -> None:
    guest = guest_of([1, 2])
    add(guest, "r")
    guest.remove(["r", "unknown"])
    assert "r" not in guest
    with pytest.raises(InputError, match="request 'r' was not added"):
        guest.propose(["r"], np.array([[5, 1]], np.int32), np.array([2]), np.array([3]))


def test_counts_beyond_the_columns_are_refused_also_after_a_draft() -> None:
    guest = guest_of([1, 2, 3, 4, 5])
    add(guest, "r")
    tokens = np.array([[5, 1, 2]], np.int32)
    assert guest.propose(["r"], tokens, np.array([2]), np.array([4])) == [[2, 3, 4, 5]]
    with pytest.raises(InputError, match=r"num_tokens <= 3 columns .* in row 0; correct the counts"):
        guest.propose(["r"], tokens, np.array([6]), np.array([4]))


def test_a_guest_drafts_no_trees() -> None:
    with pytest.raises(ConfigError, match='a drafter of shape "chain", got "tree"'):
        RequestDrafter(Drafter(store_of({})))
