"""Lost sharing is explained by position, two tokens and the repeated tokens, and agrees with a slow reference."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.tree.forest import Forest
from treering.tree.repeats import GRAM, Fork, Losses, explain_losses

RUN = list(range(100, 140))
OTHER_RUN = list(range(200, 240))


def losses(*sets: list[list[int]], limit: int = 20) -> Losses:
    return explain_losses([Forest.from_sequences(sequences) for sequences in sets], limit)


def only(found: Losses) -> Fork:
    [divergence] = found.divergences
    assert divergence.num_tokens == found.num_repeated_tokens
    assert found.num_forks == 1
    return divergence


def test_one_token_that_differs_loses_all_that_follows() -> None:
    found = losses([[1, 2, *RUN], [1, 3, *RUN]])
    assert only(found) == Fork(
        forest=0,
        other_forest=0,
        branch=1,
        other_branch=0,
        position=1,
        token=3,
        other_token=2,
        num_tokens=40,
        shift=0,
    )
    assert (found.num_tokens, found.repeated_share) == (83, 40 / 83)


@pytest.mark.parametrize(("inserted", "shift"), [([7, 8, 9], 2), ([], -1)])
def test_insertions_and_deletions_shift_later_tokens(inserted: list[int], shift: int) -> None:
    found = only(losses([[1, 2, *RUN], [1, *inserted, *RUN]]))
    assert (found.position, found.num_tokens, found.shift) == (1, 40, shift)
    assert (found.token, found.other_token) == ((7, 2) if inserted else (RUN[0], 2))


def test_runs_shorter_than_a_gram_do_not_count() -> None:
    assert losses([[1, 2, *RUN[: GRAM - 1]], [1, 3, *RUN[: GRAM - 1]]]).num_repeated_tokens == 0
    assert losses([[1, 2, *RUN[:GRAM]], [1, 3, *RUN[:GRAM]]]).num_repeated_tokens == GRAM


def test_repeats_of_a_branchs_own_path_do_not_count() -> None:
    assert losses([[1, *RUN, 2, *RUN, 3, *RUN]]).num_repeated_tokens == 0


def test_several_runs_after_one_fork_add_up_and_the_longest_gives_the_shift() -> None:
    ours = [1, 3, *RUN, 8, 9, *OTHER_RUN[:20]]
    found = only(losses([[1, 2, *RUN, 7, *OTHER_RUN[:20]], ours]))
    assert (found.num_tokens, found.shift) == (60, 0)


def test_a_repeat_that_forks_counts_both_sides_once() -> None:
    base = [1, 2, *RUN, *OTHER_RUN]
    edited = [1, 3, *RUN]
    found = losses([base, [1, 2, *RUN, *RUN], [*edited, *OTHER_RUN], [*edited, *RUN]])
    # RUN and OTHER_RUN of the edited side, and its second RUN, which the second branch has at the same position.
    assert found.num_repeated_tokens == 120
    assert {(d.position, d.token, d.other_token) for d in found.divergences} == {(1, 3, 2)}


def test_the_costliest_forks_come_first_and_the_rest_is_counted() -> None:
    sets = [
        [[i, 2, *range(1000 * i, 1000 * i + 20 + i)], [i, 3, *range(1000 * i, 1000 * i + 20 + i)]] for i in (1, 3, 2)
    ]
    found = losses([sequence for group in sets for sequence in group], limit=2)
    assert [d.num_tokens for d in found.divergences] == [23, 22]
    assert [(d.branch, d.other_branch) for d in found.divergences] == [(3, 2), (5, 4)]
    assert (found.num_forks, found.num_repeated_tokens) == (3, 66)


def test_forests_that_share_a_prefix_are_told_apart_where_they_differ() -> None:
    found = only(losses([[9, 9]], [[*RUN, 5]], [[*RUN, 6], [4]]))
    assert (found.forest, found.other_forest, found.branch, found.other_branch) == (2, 1, 2, 1)
    assert (found.position, found.token, found.other_token, found.num_tokens, found.shift) == (40, 6, 5, 40, 0)


def test_equal_forests_have_no_token_at_the_difference() -> None:
    found = only(losses([RUN], [RUN]))
    assert (found.position, found.token, found.other_token) == (40, None, None)
    longer = only(losses([RUN], [[*RUN, 1]]))
    assert (longer.position, longer.token, longer.other_token) == (40, 1, None)


def test_nothing_has_no_losses() -> None:
    assert losses() == losses([]) == Losses(num_tokens=0, num_repeated_tokens=0, num_forks=0, divergences=())
    assert losses().repeated_share == 0.0
    assert losses([[1, 2], [1, 3]]).divergences == ()


def spliced(seed: int) -> list[list[list[int]]]:
    """Return forests of sequences joined from a few chunks, so that grams repeat in every way."""
    rng = random.Random(seed)
    chunks = [[rng.randrange(50) for _ in range(rng.choice([1, 4, 12, 20, 30]))] for _ in range(5)]

    def sequence() -> list[int]:
        return [token for _ in range(rng.randint(1, 5)) for token in rng.choice(chunks)]

    return [[sequence() for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 3))]


@given(st.integers(0, 10_000))
def test_repeated_tokens_lie_between_two_slow_counts(seed: int) -> None:
    forests = [Forest.from_sequences(sequences) for sequences in spliced(seed)]
    joined = Forest.concatenate(forests)
    paths: list[list[int]] = []
    for token, above in enumerate(joined.parent.tolist()):
        paths.append([*(paths[above] if above >= 0 else []), token])
    holders: dict[tuple[int, ...], list[int]] = {}
    surely, possibly = set(), set()
    for token, path in enumerate(paths):
        if len(path) < GRAM:
            continue
        gram = tuple(joined.tokens[path[-GRAM:]].tolist())
        earlier = [other for other in holders.get(gram, []) if other not in path]
        for other in earlier:
            shared = len(set(path) & set(paths[other]))
            possibly.update(path[max(shared, len(path) - GRAM) :])
        if earlier and holders[gram][0] == earlier[0]:
            surely.add(token)
        holders.setdefault(gram, []).append(token)
    found = explain_losses(forests, limit=1000)
    assert len(surely) <= found.num_repeated_tokens <= len(possibly)
    assert sum(d.num_tokens for d in found.divergences) == found.num_repeated_tokens
    flat = [joined.tokens[joined.path(i)].tolist() for i in range(joined.num_branches)]
    for d in found.divergences:
        ours, theirs = flat[d.branch], flat[d.other_branch]
        assert ours[: d.position] == theirs[: d.position]
        assert d.token == (ours[d.position] if d.position < len(ours) else None)
        assert d.other_token == (theirs[d.position] if d.position < len(theirs) else None)
        assert d.token != d.other_token or d.token is None


def pairs_of(found: Losses) -> dict[tuple[int | None, int | None], int]:
    return {(d.token, d.other_token): d.num_tokens for d in found.divergences}


def test_a_repeat_that_continues_in_another_branch_counts_against_that_one() -> None:
    # The third branch repeats the first one's run, then a continuation of that run that only the second branch has.
    found = losses([[1, 2, *RUN], [1, 4, *RUN[-20:], 77, *OTHER_RUN], [1, 3, *RUN, 77, *OTHER_RUN]])
    assert pairs_of(found) == {(4, 2): 20, (3, 2): 40, (3, 4): 41}


def test_a_repeat_continues_in_its_own_branch_although_an_earlier_one_has_the_same_run() -> None:
    found = losses([[1, 2, *RUN], [1, 4, *OTHER_RUN, *RUN], [1, 3, *OTHER_RUN, *RUN]])
    assert pairs_of(found) == {(4, 2): 40, (3, 4): 80}
