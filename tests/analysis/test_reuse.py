"""Reuse is what the definition says: a plain walk over lists, looking at every place of every text."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.history.recordings import Line, recording
from treering.analysis.recording import Recorded, other_prompts
from treering.analysis.reuse import Reuse, ReuseMeter, Source

CLASSES = [range(1, 3), range(3, 8), range(8, 16), range(16, 10**6)]


def walk(cur: Sequence[int], sampled: Sequence[bool], texts: Sequence[Sequence[int]] | None) -> list[int]:
    """Lengths of the hits, in order; `texts` None copies from what stands before."""
    hits, i = [], 0
    while i < len(cur):
        if not sampled[i]:
            i += 1
            continue
        run_end = next((j for j in range(i, len(cur)) if not sampled[j]), len(cur))
        longest = 0
        for text in [cur[:i]] if texts is None else texts:
            for p in range(3, len(text)):
                if i >= 3 and list(text[p - 3 : p]) == list(cur[i - 3 : i]):
                    k = 0
                    while i + k < run_end and p + k < len(text) and text[p + k] == cur[i + k]:
                        k += 1
                    longest = max(longest, k)
        hits += [longest] if longest else []
        i += max(longest, 1)
    return hits


def expected(lines: Sequence[Line], epoch: int, before: int | None, source: Source, others: dict[str, str]) -> Reuse:
    """Of the lines of an epoch, those alone whose task is in the epoch before."""
    chosen = [line for line in lines if line.epoch == epoch]
    if before is not None:
        known = {line.task for line in lines if line.epoch == before}
        chosen = [line for line in chosen if line.task in known]
    found = []
    for line in chosen:
        texts: Sequence[Sequence[int]] | None = None
        if source == "siblings":
            texts = [one.response for one in chosen if one.task == line.task and one is not line]
        elif source != "own":
            task = line.task if source == "history" else others[line.task]
            texts = [one.response for one in lines if one.task == task and one.epoch == before]
        found.append(walk(line.response, line.is_sampled, texts))
    counts = [sum(line.is_sampled) for line in chosen]
    return Reuse(
        num_rollouts=len(chosen),
        num_tokens=sum(counts),
        num_copied=sum(map(sum, found)),
        num_after_prefix=sum(sum(line.is_sampled[3:]) for line in chosen),
        num_hits=tuple(sum(hit in kind for hits in found for hit in hits) for kind in CLASSES),
        hit_tokens=tuple(sum(hit for hits in found for hit in hits if hit in kind) for kind in CLASSES),
    )


@st.composite
def many_lines(draw: st.DrawFn) -> list[Line]:
    """Rollouts over few tokens, so that much repeats; some with observations, tasks missing here and there."""
    seeds = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seeds)
    num_tokens = draw(st.integers(1, 4))
    lines = []
    for epoch in draw(st.sampled_from([(0,), (0, 1), (0, 2, 3)])):
        for task in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6)):
            response = random.integers(0, num_tokens, random.integers(1, 40))
            mask = random.random(response.size) < draw(st.sampled_from([1.0, 0.8]))
            mask[0] = True
            lines.append(Line(task=task, epoch=epoch, response=tuple(response.tolist()), mask=tuple(mask.tolist())))
    return lines


def pairs(recorded: Recorded) -> dict[str, dict[str, str]]:
    """The other prompt of each, by the tasks that an epoch has, as a comma-joined name."""
    names = np.array(recorded.prompt_ids)
    found = {}
    for epoch in np.unique(recorded.epochs):
        present = np.isin(np.arange(names.size), recorded.prompts[recorded.epochs == epoch])
        others = other_prompts(present)
        found[str(epoch)] = {str(names[i]): str(names[others[i]]) for i in np.flatnonzero(others >= 0)}
    return found


@given(many_lines())
def test_every_source_is_measured_as_the_definition_says(lines: list[Line]) -> None:
    recorded = recording(*lines)
    meter = ReuseMeter(recorded)
    assert meter.epochs() == sorted({line.epoch for line in lines})
    for before, epoch in zip([None, *meter.epochs()[:-1]], meter.epochs(), strict=True):
        rollouts = meter.rollouts_of(epoch)
        others = pairs(recorded).get(str(before), {})
        for source in ("history", "other_prompt", "own", "siblings"):
            got = meter.measure(rollouts, source)
            if got is None:
                continue
            assert got == expected(lines, epoch, before, source, others)


@given(many_lines())
def test_a_source_is_there_exactly_where_a_rollout_has_it(lines: list[Line]) -> None:
    meter = ReuseMeter(recording(*lines))
    for before, epoch in zip([None, *meter.epochs()[:-1]], meter.epochs(), strict=True):
        rollouts = meter.rollouts_of(epoch)
        earlier = {line.task for line in lines if line.epoch == before}
        now = [line.task for line in lines if line.epoch == epoch and (before is None or line.task in earlier)]
        there = {source: meter.measure(rollouts, source) is not None for source in ("history", "other_prompt", "own")}
        assert there == {
            "history": before is not None and bool(now),
            "other_prompt": before is not None and bool(now) and len(earlier) > 1,
            "own": bool(now),
        }
        assert (meter.measure(rollouts, "siblings") is not None) == (len(set(now)) < len(now))


def both(first: Sequence[int], second: Sequence[int]) -> Reuse:
    """The second as a rollout of epoch 1, against the first of epoch 0."""
    meter = ReuseMeter(recording(Line(response=tuple(first)), Line(response=tuple(second), epoch=1)))
    found = meter.measure(meter.rollouts_of(1), "history")
    assert found is not None
    return found


def test_an_epoch_that_repeats_itself_copies_all_but_the_first_three_tokens() -> None:
    found = both(range(20), range(20))
    assert (found.num_copied, found.num_after_prefix, found.rate, found.num_hits) == (17, 17, 0.85, (0, 0, 0, 1))


def test_after_an_edit_three_tokens_are_generated_before_the_next_hit() -> None:
    # 0 1 2 generated, 3 4 copied, 99 generated, 6 7 8 generated, 9 to 19 copied.
    found = both(range(20), [*range(5), 99, *range(6, 20)])
    assert (found.num_copied, found.num_hits, found.hit_tokens) == (2 + 11, (1, 0, 1, 0), (2, 0, 11, 0))


def test_the_prompt_is_no_part_of_the_three_tokens() -> None:
    text = (1, 2, 3, 4)
    meter = ReuseMeter(recording(Line(prompt=(7, 8, 9), response=text), Line(prompt=(7, 8, 9), response=text, epoch=1)))
    found = meter.measure(meter.rollouts_of(1), "history")
    assert found is not None
    assert found.num_copied == 1


@pytest.mark.parametrize("num_prompts", [2, 3, 10])
def test_the_other_prompt_is_another_one_and_the_same_in_every_epoch(num_prompts: int) -> None:
    others = other_prompts(np.ones(num_prompts, np.bool_))
    assert sorted(others.tolist()) == list(range(num_prompts))
    assert (others != np.arange(num_prompts)).all()
    # One that leaves changes the other of the prompt before it alone.
    present = np.arange(num_prompts) != 0
    left = other_prompts(present)
    changed = [i for i in range(1, num_prompts) if left[i] != others[i]]
    assert left[0] == -1
    assert changed == [others.tolist().index(0)]


def test_a_prompt_that_is_alone_has_no_other_one() -> None:
    assert other_prompts(np.array([False, True, False])).tolist() == [-1, -1, -1]
