"""A drafter says which source each drafted token has its strongest match in."""

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows
from treering.errors import StateError
from treering.history.draft.drafter import Drafter
from treering.history.features import SOURCES
from treering.history.store.store import HistoryStore

TEXT = tuple(range(100, 130))


def sources_of(drafter: Drafter, *rows: Row) -> list[set[str]]:
    """The sources of each row's drafted tokens."""
    drafts = drafter.propose(draft_rows(rows))
    found = np.array(SOURCES)[drafter.sources_of_latest()]
    return [set(found[begin:end].tolist()) for begin, end in zip(drafts.offsets, drafts.offsets[1:], strict=False)]


def row(rollout: tuple[int, ...], prompt_id: str, group: int = 0) -> Row:
    return Row(prompt=(1, 2), rollout=rollout, prompt_id=prompt_id, group=group, max_drafts=8)


def test_each_source_is_named_where_it_alone_has_the_text() -> None:
    store = HistoryStore()
    store.add("a", [np.array(TEXT, np.int32)], version=0)
    store.publish()
    assert sources_of(Drafter(store), row(TEXT[:8], "a")) == [{"history"}]
    assert sources_of(Drafter(store), row(TEXT[:8], "b")) == [{"others"}]
    assert sources_of(Drafter(HistoryStore()), row(TEXT[:12] + TEXT[:6], "a")) == [{"own"}]
    leader, follower = sources_of(Drafter(HistoryStore()), row(TEXT, "a"), row(TEXT[:8], "a"))
    assert (leader, follower) == (set(), {"siblings"})


def test_without_drafts_to_observe_there_are_no_sources() -> None:
    drafter = Drafter(HistoryStore())
    with pytest.raises(StateError, match="there are none; propose"):
        drafter.sources_of_latest()
    rows = draft_rows([row(TEXT[:8], "a")])
    assert drafter.propose(rows).tokens.size == drafter.sources_of_latest().size
