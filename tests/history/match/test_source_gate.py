"""Other prompts are searched while that saves more time than it costs, and again once it does."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of, walk
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, NUM_KINDS, NUM_LENGTHS, NUM_SOURCES, OTHERS
from treering.history.match.sources import SourceGate

ALL = np.ones(NUM_SOURCES, np.bool_)
TOKEN_S = 75e-6


def gate_of(enabled: np.ndarray = ALL) -> SourceGate:
    return SourceGate(enabled, np.zeros(3))


def note(gate: SourceGate, num_rows: int, num_accepted: int, token_s: float = TOKEN_S) -> None:
    """So many rows, of which the first has so many accepted tokens from other prompts and the rest no drafts."""
    offsets = np.minimum(np.arange(num_rows + 1), 1) * num_accepted
    features = np.full((num_accepted, NUM_KINDS), FIRST.match + OTHERS * NUM_LENGTHS, np.int32)
    gate.note(offsets, features, np.ones(num_accepted, np.int8), token_s)


def asks(gate: SourceGate, num_steps: int, *, num_accepted: int, num_rows: int = 64, token_s: float = TOKEN_S) -> str:
    """A letter a step: "a" where other prompts are asked, "-" where they are not."""
    said = ""
    for _ in range(num_steps):
        said += "a" if gate.due()[OTHERS] else "-"
        note(gate, num_rows, num_accepted, token_s)
    return said


def test_what_brings_nothing_is_asked_in_one_step_of_16_behind_512_rows() -> None:
    assert asks(gate_of(), 40, num_accepted=0) == "a" * 8 + "-" * 15 + "a" + "-" * 15 + "a"
    assert asks(gate_of(), 600, num_accepted=0, num_rows=1) == "a" * 512 + ("-" * 15 + "a") * 5 + "-" * 8


@pytest.mark.parametrize(
    # To ask takes 64 rows 96 us.
    ("num_accepted", "token_s", "pays"),
    [(1, 96.1e-6, True), (1, 95.9e-6, False), (64, 1.6e-6, True), (64, 1.4e-6, False)],
)
def test_asking_pays_where_tokens_save_more_than_it_takes(num_accepted: int, token_s: float, pays: bool) -> None:
    said = asks(gate_of(), 200, num_accepted=num_accepted, token_s=token_s)
    assert said == "a" * 200 if pays else said.count("a") == 8 + 192 // 16


def test_what_brings_more_again_is_asked_in_every_step() -> None:
    gate = gate_of()
    asks(gate, 8 + 16 * 40, num_accepted=0)
    # In 1,024 rows 21 tokens pay, and more rows are not remembered: 22 of the next 64 rows are enough.
    assert asks(gate, 100, num_accepted=22) == "-" * 15 + "a" * 85


def drafter_of(others: list[int]) -> Drafter:
    """With a history of another prompt alone; drafts whatever it finds."""
    return Drafter(store_of({"p": {0: [others]}}), min_acceptance=1e-6)


def step(drafter: Drafter, truth: tuple[int, ...]) -> int:
    """How many tokens 64 rows of a prompt without history are drafted that stand where the other's rollout goes on."""
    rows = draft_rows([Row(rollout=(7, 8, 9), group=b) for b in range(64)])
    drafts = drafter.propose(rows)
    walked = [walk(drafts, b, truth) for b in range(64)]
    drafter.observe(rows, np.array([count for count, _ in walked]), leaves=np.array([leaf for _, leaf in walked]))
    return int(drafts.tokens.size)


def test_a_drafter_looks_less_where_others_never_come_true_and_always_where_they_do() -> None:
    failing, working = drafter_of([7, 8, 9, 10]), drafter_of([7, 8, 9, 10])
    sizes = [step(failing, (50,)) for _ in range(40)]
    assert [size > 0 for size in sizes] == [k < 8 or (k - 8) % 16 == 15 for k in range(40)]
    assert min(step(working, (10,)) for _ in range(40)) > 0


@pytest.mark.parametrize(("row_s", "num_asked"), [(100e-6, 40), (90e-6, 10)])
def test_what_a_token_takes_is_known_from_costs(row_s: float, num_asked: int) -> None:
    """Of 64 rows one has others alone, which always come true: to ask takes 96 us, and a row's share is `row_s`."""
    history = [7, 8, 9, 10, 11, 12]
    drafter = Drafter(store_of({"q": {0: [history]}, "p": {0: [[20, 21, 22, 23]]}}))
    drafter.use_costs(VerifyCosts(num_tokens=np.array([64, 65]), seconds=np.array([64 * row_s, 64 * row_s + 1e-9])))
    alone = Row(prompt_id="z", rollout=(20, 21, 22), group=99)
    sizes = []
    for _ in range(40):
        rows = draft_rows([alone, *(Row(rollout=(7, 8, 9), group=b) for b in range(63))])
        drafts = drafter.propose(rows)
        sizes.append(drafts.offsets[1])
        walked = [walk(drafts, b, (10, 11, 12) if b > 0 else (23,)) for b in range(64)]
        drafter.observe(rows, np.array([count for count, _ in walked]), leaves=np.array([leaf for _, leaf in walked]))
    assert sum(size > 0 for size in sizes) == num_asked
