"""Weights in messages: the parts make the whole, also after a trainer that died between two."""

import pytest

from treering.runtime.ipc import weight_store as published_weights
from treering.runtime.ipc.weight_store import IncomingWeights, parts_of

WEIGHTS = bytes(range(100))


@pytest.mark.parametrize("part_bytes", [1, 33, 50, 100, 101])
def test_the_parts_make_the_weights(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_weights, "PART_BYTES", part_bytes)
    incoming = IncomingWeights()
    for version in (1, 2):
        *firsts, last = parts_of(version, WEIGHTS)
        assert len(firsts) == (100 - 1) // part_bytes
        assert [incoming.take(part) for part in firsts] == [None] * len(firsts)
        assert incoming.take(last) == WEIGHTS


def test_a_new_trainer_starts_from_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_weights, "PART_BYTES", 60)
    incoming = IncomingWeights()
    assert incoming.take(next(parts_of(1, WEIGHTS))) is None
    first, last = parts_of(1, WEIGHTS[::-1])
    assert incoming.take(first) is None
    assert incoming.take(last) == WEIGHTS[::-1]
