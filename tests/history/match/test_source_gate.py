"""Others, and history behind edits, are looked at as long as that saves more than it takes, and again when it does."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of, walk
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.acceptance import Acceptance
from treering.history.draft.drafter import Drafter
from treering.history.features import (
    EDITS,
    FIRST,
    HISTORY,
    NUM_EDITS,
    NUM_KINDS,
    NUM_LENGTH_CLASSES,
    NUM_LENGTHS,
    NUM_SOURCES,
    OTHERS,
    SIBLINGS,
)
from treering.history.match.source_gate import ASKED, EnabledSources, SourceGate, num_brought

ALL = np.ones(NUM_SOURCES, np.bool_)
TOKEN_S = 75e-6
ASK_S = 1.5e-6


def asking_of() -> SourceGate:
    return SourceGate(ASK_S, 512, np.zeros(3))


def asks(asking: SourceGate, num_steps: int, *, num_accepted: int, num_rows: int = 64, token_s: float = TOKEN_S) -> str:
    """A letter a step: "a" where it is asked, "-" where it is not."""
    said = ""
    for _ in range(num_steps):
        said += "a" if asking.is_due() else "-"
        asking.note(num_rows, num_accepted, token_s)
    return said


def test_what_brings_nothing_is_asked_in_one_step_of_16_behind_512_rows() -> None:
    assert asks(asking_of(), 40, num_accepted=0) == "a" * 8 + "-" * 15 + "a" + "-" * 15 + "a"
    assert asks(asking_of(), 600, num_accepted=0, num_rows=1) == "a" * 512 + ("-" * 15 + "a") * 5 + "-" * 8


@pytest.mark.parametrize(
    ("num_accepted", "token_s", "pays"),
    [
        # To ask takes 64 rows 96 us.
        (1, 96.1e-6, True),
        (1, 95.9e-6, False),
        (2, 48.1e-6, True),
        (2, 47.9e-6, False),
        (64, 1.6e-6, True),
        (64, 1.4e-6, False),
    ],
)
def test_asking_pays_where_tokens_save_more_than_it_takes(num_accepted: int, token_s: float, pays: bool) -> None:
    said = asks(asking_of(), 200, num_accepted=num_accepted, token_s=token_s)
    assert said == "a" * 200 if pays else said.count("a") == 8 + 192 // 16


@pytest.mark.parametrize("num_asked", range(30, 60, 2))
def test_what_brings_more_again_is_asked_in_every_step(num_asked: int) -> None:
    asking = asking_of()
    asks(asking, 8 + 16 * num_asked, num_accepted=0)
    # In 1,024 rows 21 tokens pay, and more rows are not remembered: 22 of the next 64 rows are enough.
    said = asks(asking, 100, num_accepted=22)
    assert said == "-" * 15 + "a" * 85


def test_steps_that_did_not_ask_say_nothing() -> None:
    asking = asking_of()
    asks(asking, 8, num_accepted=0)
    assert not asking.is_due()
    asking.note(10_000, 10_000, 1.0)
    assert asks(asking, 15, num_accepted=0) == "-" * 14 + "a"


def nothing_came(looks: EnabledSources, num_rows: int = 64) -> None:
    nothing = np.zeros(0, np.int32)
    looks.note(
        np.zeros(num_rows + 1, np.int64), nothing, np.zeros((0, NUM_KINDS), np.int32), np.zeros(0, np.int8), TOKEN_S
    )


@pytest.mark.parametrize("unused", [(), (OTHERS,), (HISTORY,), (SIBLINGS,), (HISTORY, OTHERS)])
def test_sources_are_looked_at_in_every_step_but_those_that_rest_and_none_that_is_not_used(
    unused: tuple[int, ...],
) -> None:
    """Of 64 rows a step 8 steps are 512 rows, which tell of others, and 32 are 2,048, which tell of edits."""
    uses, counts = ALL & ~np.isin(np.arange(NUM_SOURCES), unused), np.zeros((2, 3))
    looks = EnabledSources(uses, counts)
    for step in range(100):
        due = looks.due()
        assert (np.delete(due[:NUM_SOURCES], OTHERS) == np.delete(uses, OTHERS)).all()
        assert due[OTHERS] == (uses[OTHERS] and (step < 8 or (step - 8) % 16 == 15))
        assert due[EDITS] == (uses[HISTORY] and (step < 32 or (step - 32) % 16 == 15))
        nothing_came(looks)
    assert (counts[0].any(), counts[1].any()) == (uses[OTHERS], uses[HISTORY])


def test_each_place_is_asked_by_what_it_has_brought_itself() -> None:
    counts = np.zeros((2, 3))
    looks = EnabledSources(ALL, counts)
    for place, line in zip(ASKED, counts, strict=True):
        line[:] = 1000, 0, 1
        due = looks.due()
        assert [other for other in ASKED if not due[other]] == [place]


def accepted_tokens(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, ...]:
    """Drafts of random shape whose accepted tokens form a path from the context on."""
    sizes = rng.integers(0, 6, num_rows)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    parents = np.array([rng.integers(-1, i) if i > 0 else -1 for size in sizes for i in range(size)], np.int32)
    was_accepted = rng.choice(np.array([-1, 0], np.int8), offsets[-1])
    for b in range(num_rows):
        i = rng.integers(-1, sizes[b]) if sizes[b] else -1
        while i >= 0:
            was_accepted[offsets[b] + i] = 1
            i = parents[offsets[b] + i]
    return offsets, parents, was_accepted


def test_tokens_count_for_others_one_by_one_and_for_edits_by_the_row_that_began_with_one() -> None:
    rng = np.random.default_rng(0)
    offsets, parents, was_accepted = accepted_tokens(rng, 400)
    size = parents.size
    sources, lengths = rng.integers(0, NUM_SOURCES, size), rng.integers(0, NUM_LENGTHS, size)
    edits, classes = rng.integers(0, NUM_EDITS, size), rng.integers(0, NUM_LENGTH_CLASSES, size) % 3
    features = rng.integers(0, 1000, (size + 20, NUM_KINDS)).astype(np.int32)
    features[:size, 1] = FIRST[1] + sources * NUM_LENGTHS + lengths
    features[:size, 2] = FIRST[2] + edits * NUM_LENGTH_CLASSES + classes
    num_known = from_others = behind_edits = 0
    for b in range(400):
        came = [i for i in range(offsets[b], offsets[b + 1]) if was_accepted[i] == 1]
        from_others += sum(bool(sources[i] == OTHERS) for i in came)
        num_known += offsets[b] == offsets[b + 1] or any(was_accepted[offsets[b] : offsets[b + 1]] >= 0)
        begun = any(parents[i] == -1 and edits[i] > 0 and classes[i] == 0 for i in came)
        behind_edits += len(came) if begun else 0
    assert num_brought(offsets, parents, features, was_accepted) == (num_known, from_others, behind_edits)
    assert min(from_others, behind_edits, 400 - num_known) > 5


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


def test_a_state_knows_what_others_brought() -> None:
    drafter, resumed = drafter_of([7, 8, 9, 10]), drafter_of([7, 8, 9, 10])
    for _ in range(12):
        step(drafter, (50,))
    resumed.load_state(drafter.state())
    sizes = [(step(drafter, (50,)), step(resumed, (50,))) for _ in range(30)]
    assert sizes == [(64, 64) if k in (11, 27) else (0, 0) for k in range(30)]
    assert Acceptance().state()["asked"].tolist() == [[0.0, 0.0, 0.0]] * 2


def edited_step(drafter: Drafter, step: int, truth: tuple[int, ...]) -> int:
    """How many tokens 64 new rows are drafted whose rollouts replaced a token of the one in history, its 10 by 50.

    `truth` is what comes behind.
    """
    row_ids = list(range(64 * step, 64 * (step + 1)))
    rows = draft_rows([Row(rollout=(7, 8, 9, 50), group=b) for b in range(64)], row_ids=row_ids)
    drafts = drafter.propose(rows)
    walked = [walk(drafts, b, truth) for b in range(64)]
    drafter.observe(rows, np.array([count for count, _ in walked]), leaves=np.array([leaf for _, leaf in walked]))
    return int(drafts.tokens.size)


@pytest.mark.parametrize(("truth", "rests"), [((60,), True), ((11, 12), False)])
def test_history_behind_edits_is_searched_as_long_as_what_it_brings_comes_true(
    truth: tuple[int, ...], rests: bool
) -> None:
    drafter = Drafter(
        store_of({"q": {0: [[7, 8, 9, 10, 11, 12]]}}), min_acceptance=1e-6, sources=("history",)
    )  # fmt: skip
    sizes = [edited_step(drafter, step, truth) for step in range(80)]
    assert [size > 0 for size in sizes] == [not rests or k < 32 or (k - 32) % 16 == 15 for k in range(80)]
