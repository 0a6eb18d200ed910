"""A replay drafts like a Drafter and counts the drafts that the recording confirms."""

import numpy as np
import pytest

from tests.history.recordings import Line, recording
from tests.history.reference import Row, draft_rows
from treering.analysis import replay as module
from treering.analysis.replay import Drafted, replay
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.store.store import HistoryStore

LOOKS = ("all", "history", "other_prompt", "own")


def disjoint(task: int, epoch: int, **given: object) -> Line:
    """Return 40 distinct tokens, the same in every epoch and different for each task."""
    return Line(task=str(task), epoch=epoch, response=tuple(range(100 * task, 100 * task + 40)), **given)  # type: ignore[arg-type]


def by_hand(responses: list[tuple[int, ...]], **settings: object) -> list[Drafted]:
    """Draft one rollout per epoch through the drafter's public API."""
    store = HistoryStore()
    drafter = Drafter(store, sources=("history", "own"), **settings)  # type: ignore[arg-type]
    found = []
    for epoch, response in enumerate(responses):
        drafted, done = Drafted(), 0
        while done < len(response):
            rows = draft_rows(
                [Row(prompt=(90, 91), rollout=response[:done], prompt_id=0, max_drafts=10**9)], row_ids=[epoch]
            )
            drafts = drafter.propose(rows)
            leaf, accepted = -1, 0
            while done + accepted < len(response):
                step = [
                    i
                    for i, token in enumerate(drafts.tokens.tolist())
                    if drafts.parents[i] == leaf and token == response[done + accepted]
                ]
                if not step:
                    break
                leaf, accepted = step[0], accepted + 1
            if drafts.tokens.size:
                drafter.observe(rows, np.array([accepted]), leaves=np.array([leaf]))
            emitted = min(accepted + 1, len(response) - done)
            drafted.num_steps, drafted.num_tokens = drafted.num_steps + 1, drafted.num_tokens + emitted
            drafted.num_drafted += drafts.tokens.size
            drafted.num_accepted += accepted
            done += emitted
        found.append(drafted)
        store.add(0, [np.array(response, np.int32)], epoch)
        store.publish()
        drafter.load_state(drafter.state())
    return found


@pytest.mark.parametrize("settings", [{}, {"max_draft": 3, "min_acceptance": 0.3}, {"shape": "chain"}])
def test_a_replay_is_what_the_drafter_does_by_hand(settings: dict[str, object]) -> None:
    random = np.random.default_rng(1)
    first = random.integers(0, 6, 60)
    responses = []
    for _ in range(4):
        edited = np.where(random.random(60) < 0.1, random.integers(0, 6, 60), first)
        responses.append(tuple(edited[: random.integers(30, 60)].tolist()))
    recorded = recording(*(Line(epoch=epoch, response=text) for epoch, text in enumerate(responses)))
    found = replay(recorded, "history", settings=settings)
    assert list(found.values()) == by_hand(responses, **settings)
    assert found[3].num_accepted > 10


def test_recurring_tokens_are_drafted_only_from_the_right_history() -> None:
    recorded = recording(*(disjoint(task, epoch) for epoch in range(3) for task in range(3)))
    found = {look: replay(recorded, look) for look in LOOKS}
    for look in LOOKS:
        assert [drafted.num_tokens for drafted in found[look].values()] == [120] * 3
        assert found[look][0].tokens_per_step == 1.0
    for look in ("all", "history"):
        assert found[look][2].tokens_per_step > 4
    for look in ("other_prompt", "own"):
        assert [found[look][epoch].num_accepted for epoch in range(3)] == [0, 0, 0]


def test_the_other_prompt_is_the_history_that_it_would_be_for_that_prompt() -> None:
    # The two prompts swap responses in each epoch, so each prompt's tokens recur in the other's history.
    lines = [
        Line(task=str(task), epoch=epoch, response=disjoint((task + epoch) % 2, 0).response)
        for epoch in range(2)
        for task in range(2)
    ]
    found = {look: replay(recording(*lines), look)[1].num_accepted for look in ("history", "other_prompt")}
    assert found["history"] == 0
    assert found["other_prompt"] > 40


def test_the_other_prompt_is_one_of_those_that_are_replayed() -> None:
    lines = [
        Line(task=str(task), epoch=epoch, response=disjoint(task, 0).response)
        for epoch in range(2)
        for task in range(10)
    ]
    # Two of ten prompts are sampled; in the second epoch each has the other's earlier response.
    lines[12], lines[17] = (
        Line(task="2", epoch=1, response=lines[7].response),
        Line(task="7", epoch=1, response=lines[2].response),
    )
    sample = recording(*lines, choose=lambda whole: whole.taking(np.array([2, 7, 12, 17])))
    assert replay(sample, "other_prompt")[1].num_accepted > 40


def test_history_is_published_between_steps_and_never_inside_one() -> None:
    together = recording(disjoint(0, 0, step=1), disjoint(0, 0, step=1))
    apart = recording(disjoint(0, 0, step=1), disjoint(0, 0, step=2))
    assert replay(together, "history")[0].num_accepted == 0
    assert replay(apart, "history")[0].num_accepted > 20


def test_rows_of_a_step_are_forgotten_after_it() -> None:
    apart = recording(disjoint(0, 0, step=1), disjoint(0, 0, step=2))
    assert replay(apart, "all", settings={"sources": ("siblings",)})[0].num_accepted == 0


def test_a_drafter_sees_each_rollout_as_far_as_it_was_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watching(Drafter):
        def propose(self, rows: DraftRows) -> Drafts:
            for b, rollout in enumerate(rows.row_ids.tolist()):  # type: ignore[union-attr]
                context = rows.tokens[b, : rows.num_tokens[b]].tolist()
                begin = int(recorded.offsets[rollout])
                assert context == recorded.tokens[begin : begin + len(context)].tolist()
                assert context[: rows.num_prompt_tokens[b]] == [90, 91]
                assert rows.prompt_ids[b] == recorded.prompts[rollout]
                seen.append(rollout)
            return super().propose(rows)

    # Rows end at different times, the first ones first, and few are left at the end.
    lines = [Line(task=str(task), response=tuple(range(100 * task, 100 * task + 3 + 5 * task))) for task in range(7)]
    recorded = recording(*lines)
    monkeypatch.setattr(module, "NUM_ROWS", 4)
    monkeypatch.setattr(module, "Drafter", Watching)
    replay(recorded, "own")
    assert np.bincount(seen).tolist() == [3 + 5 * task for task in range(7)]


def test_the_store_keeps_as_many_epochs_as_the_run_does() -> None:
    lines = [disjoint(0, 0), disjoint(0, 1), Line(task="0", epoch=1, response=(77, 78, 79)), disjoint(0, 2)]
    old = recording(lines[0], lines[2], lines[3])
    assert replay(old, "history", max_epochs=2)[2].num_accepted > 20
    assert replay(old, "history", max_epochs=1)[2].num_accepted == 0


@pytest.mark.parametrize("look", LOOKS)
def test_given_tokens_are_neither_emitted_nor_drafted_across(look: str) -> None:
    mask = (True,) * 10 + (False,) * 10 + (True,) * 20
    recorded = recording(*(disjoint(task, epoch, mask=mask) for epoch in range(2) for task in range(2)))
    found = replay(recorded, look)  # type: ignore[arg-type]
    assert [drafted.num_tokens for drafted in found.values()] == [60, 60]
    if look == "history":
        # Each of the two runs of both rollouts takes at least one step.
        assert 4 <= found[1].num_steps < 30


def test_more_rollouts_than_rows_are_all_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [disjoint(task, epoch, step=epoch + 1) for epoch in range(2) for task in range(11)]
    wide = replay(recording(*lines), "history")
    monkeypatch.setattr(module, "NUM_ROWS", 4)
    told: list[int] = []
    narrow = replay(recording(*lines), "history", on_tokens=told.append)
    assert (
        [drafted.num_tokens for drafted in narrow.values()] == [440, 440] == [one.num_tokens for one in wide.values()]
    )
    assert sum(told) == 880
    assert narrow[1].num_accepted > 200


def test_each_accepted_token_has_the_source_of_its_own_draft_token() -> None:
    # Row 0 accepts the draft tokens 0, 2 and 3 of a tree, row 1 nothing, row 2 its only token.
    origins = np.full(12, -1, np.int8)
    module.write_origins(
        origins,
        np.array([1, 6, 9]),
        np.array([0, 4, 5, 6]),
        np.array([-1, 0, 0, 2, -1, -1], np.int32),
        np.array([3, 0, 1]),
        np.array([3, -1, 0]),
        np.array([0, 3, 1, 2, 3, 3]),
    )
    assert origins.tolist() == [-1, 0, 1, 2, -1, -1, -1, -1, -1, 3, -1, -1]
