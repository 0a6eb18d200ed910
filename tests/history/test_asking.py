"""Others are asked as long as they save more than asking takes; when they save more again, they are asked again."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of, walk
from treering.history.acceptance import Acceptance
from treering.history.asking import Asking, num_from_others
from treering.history.costs import VerifyCosts
from treering.history.draft import Drafter
from treering.history.features import FIRST, NUM_KINDS, NUM_LENGTHS, NUM_SOURCES, OTHERS

ALL = np.ones(NUM_SOURCES, np.bool_)
TOKEN_S = 75e-6


def asking_of(uses: np.ndarray = ALL) -> Asking:
    return Asking(uses, np.zeros(3))


def asks(asking: Asking, num_steps: int, *, num_accepted: int, num_rows: int = 64, token_s: float = TOKEN_S) -> str:
    """A letter a step: "a" where others are asked, "-" where they are not."""
    said = ""
    for _ in range(num_steps):
        said += "a" if asking.sources()[OTHERS] else "-"
        asking.note(num_rows, num_accepted, token_s)
    return said


def test_others_that_bring_nothing_are_asked_in_one_step_of_16_behind_512_rows() -> None:
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
def test_others_pay_where_their_tokens_save_more_than_asking_takes(
    num_accepted: int, token_s: float, pays: bool
) -> None:
    said = asks(asking_of(), 200, num_accepted=num_accepted, token_s=token_s)
    assert said == "a" * 200 if pays else said.count("a") == 8 + 192 // 16


@pytest.mark.parametrize("num_asked", range(30, 60, 2))
def test_others_that_bring_more_again_are_asked_in_every_step(num_asked: int) -> None:
    asking = asking_of()
    asks(asking, 8 + 16 * num_asked, num_accepted=0)
    # In 1,024 rows 21 tokens pay, and more rows are not remembered: 22 of the next 64 rows are enough.
    said = asks(asking, 100, num_accepted=22)
    assert said == "-" * 15 + "a" * 85


def test_other_sources_are_asked_in_every_step_and_none_that_is_not_used() -> None:
    uses = np.array([True, False, True, True])
    asking = asking_of(uses)
    for _ in range(50):
        sources = asking.sources()
        assert (np.delete(sources, OTHERS) == np.delete(uses, OTHERS)).all()
        asking.note(64, 0, TOKEN_S)
    without = asking_of(np.arange(NUM_SOURCES) != OTHERS)
    assert asks(without, 50, num_accepted=64) == "-" * 50


def test_steps_that_did_not_ask_say_nothing_of_others() -> None:
    asking = asking_of()
    asks(asking, 8, num_accepted=0)
    before = asking.sources()[OTHERS]
    assert not before
    asking.note(10_000, 10_000, 1.0)
    assert asks(asking, 15, num_accepted=0) == "-" * 14 + "a"


def test_accepted_tokens_of_others_alone_are_counted() -> None:
    rng = np.random.default_rng(0)
    sources, lengths, was_accepted = rng.integers(0, 4, 500), rng.integers(0, 11, 500), rng.integers(-1, 2, 500)
    features = rng.integers(0, 1000, (520, NUM_KINDS)).astype(np.int32)
    features[:500, 1] = FIRST[1] + sources * NUM_LENGTHS + lengths
    expected = sum(source == OTHERS and came == 1 for source, came in zip(sources, was_accepted, strict=True))
    assert num_from_others(features, was_accepted.astype(np.int8)) == expected > 20


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
