"""Other prompts are searched while that saves more time than it costs, and again once it does."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of, walk
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.acceptance import Acceptance
from treering.history.draft.drafter import Drafter
from treering.history.features import FIRST, HISTORY, NUM_KINDS, NUM_LENGTHS, NUM_SOURCES, OTHERS, SIBLINGS
from treering.history.match.sources import EnabledSources, SourceGate, count_from_others

ALL = np.ones(NUM_SOURCES, np.bool_)
TOKEN_S = 75e-6


def asking_of() -> SourceGate:
    return SourceGate(np.zeros(3))


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


def nothing_came(sources: EnabledSources, num_rows: int = 64) -> None:
    sources.note(np.zeros(num_rows + 1, np.int64), np.zeros((0, NUM_KINDS), np.int32), np.zeros(0, np.int8), TOKEN_S)


@pytest.mark.parametrize("unused", [(), (OTHERS,), (HISTORY,), (SIBLINGS,), (HISTORY, OTHERS)])
def test_only_other_prompts_are_ever_skipped_and_no_source_is_searched_that_is_not_enabled(
    unused: tuple[int, ...],
) -> None:
    enabled, counts = ALL & ~np.isin(np.arange(NUM_SOURCES), unused), np.zeros(3)
    sources = EnabledSources(enabled, counts)
    for step in range(100):
        due = sources.due()
        assert (np.delete(due, OTHERS) == np.delete(enabled, OTHERS)).all()
        # 8 steps of 64 rows are the 512 that tell.
        assert due[OTHERS] == (enabled[OTHERS] and (step < 8 or (step - 8) % 16 == 15))
        nothing_came(sources)
    assert counts.any() == enabled[OTHERS]


def accepted_tokens(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, ...]:
    """Drafts of random shape whose accepted tokens form a path from the context on."""
    sizes = rng.integers(0, 6, num_rows)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    parents = [rng.integers(-1, i) if i > 0 else -1 for size in sizes for i in range(size)]
    was_accepted = rng.choice(np.array([-1, 0], np.int8), offsets[-1])
    for b in range(num_rows):
        i = rng.integers(-1, sizes[b]) if sizes[b] else -1
        while i >= 0:
            was_accepted[offsets[b] + i] = 1
            i = parents[offsets[b] + i]
    return offsets, was_accepted


def test_accepted_tokens_count_whose_strongest_match_was_in_other_prompts() -> None:
    rng = np.random.default_rng(0)
    offsets, was_accepted = accepted_tokens(rng, 400)
    size = was_accepted.size
    sources, lengths = rng.integers(0, NUM_SOURCES, size), rng.integers(0, NUM_LENGTHS, size)
    features = rng.integers(0, 1000, (size + 20, NUM_KINDS)).astype(np.int32)
    features[:size, 1] = FIRST[1] + sources * NUM_LENGTHS + lengths
    num_known = from_others = 0
    for b in range(400):
        came = [i for i in range(offsets[b], offsets[b + 1]) if was_accepted[i] == 1]
        from_others += sum(bool(sources[i] == OTHERS) for i in came)
        num_known += offsets[b] == offsets[b + 1] or any(was_accepted[offsets[b] : offsets[b + 1]] >= 0)
    assert count_from_others(offsets, features, was_accepted) == (num_known, from_others)
    assert min(from_others, 400 - num_known) > 5


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
    assert Acceptance().state()["asked"].tolist() == [0.0, 0.0, 0.0]
