"""Routes of a mixture of experts stay with their tokens, from a file to the forests of a step."""

import json

import numpy as np
import pytest

from tests.data.cache.datasets import dataset_of
from treering.data import Trajectory, render
from treering.data.formats.codec import decode, encode
from treering.data.image import ImageData, PlacedImage
from treering.data.routed_experts import as_routes, merge_routes
from treering.errors import InputError
from treering.train.loop.batches import group_by_task, make_batch
from treering.types import Layout

RECORDS = [
    {"task_id": "a", "tokens": [5, 6, 7], "routed_experts": [[[0, 1]], [[2, 1]], [[0, 3]]]},
    {"task_id": "a", "tokens": [5, 6, 8], "routed_experts": [[[1, 0]], [[2, 1]]]},
    {"task_id": "a", "tokens": [5, 6, 7], "routed_experts": [[[1, 0]], [[3, 1]]]},
    {"task_id": "b", "tokens": [5, 9]},
]
NONE = [[-1, -1]]
SORTED = [[[[0, 1]], [[1, 2]], [[0, 3]]], [[[0, 1]], [[1, 2]], NONE], [[[0, 1]], [[1, 3]], NONE]]


def test_a_record_keeps_its_routes_when_it_is_read_and_written() -> None:
    for record, routes in zip(RECORDS, SORTED, strict=False):
        trajectory = decode(record)
        assert trajectory.routed_experts is not None
        assert trajectory.routed_experts.tolist() == routes
        again = decode(json.loads(json.dumps(encode(trajectory))))
        assert again.routed_experts is not None
        assert again.routed_experts.tolist() == routes


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([[[0, 1]]], "for 3 tokens"),
        ([[[0, 1]], [[0]], [[1, 2]]], "lists of equal lengths"),
        ([[[0.5, 1]]] * 3, "must be integers"),
        ([[[0, 40_000]]] * 3, "expert numbers in"),
        ([[[1, 1]]] * 3, "different experts"),
        ("AAAA", "must be a list"),
    ],
)
def test_malformed_routes_are_refused_with_their_rule(routes: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        decode({"task_id": "a", "tokens": [5, 6, 7], "routed_experts": routes})


def test_routes_without_tokens_are_refused() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(InputError, match="routed_experts has one entry per token and messages were given"):
        decode({"messages": chat, "routed_experts": [[[0, 1]]]})


def test_routes_of_a_trajectory_with_images_are_refused() -> None:
    image = PlacedImage(start=0, image=ImageData(values=np.ones((1, 3), np.float32), num_tokens=2))
    with pytest.raises(InputError, match="the trajectory has images"):
        Trajectory(
            task_id="a",
            tokens=np.array([9, 9, 5], np.int32),
            loss_mask=np.array([False, False, True]),
            images=(image,),
            routed_experts=np.array([[[0, 1]]] * 3, np.int16),
        )


def test_cached_rows_have_the_routes_of_their_records() -> None:
    dataset = dataset_of(render([decode(record) for record in RECORDS]))
    found = [dataset.row(i).routed_experts for i in range(len(RECORDS))]
    assert [None if routes is None else routes.tolist() for routes in found] == [*SORTED, None]
    keys, offsets = dataset.flat_keys
    pairs = [
        (token, str(route))
        for record, routes in zip(RECORDS, [*SORTED, [NONE, NONE]], strict=True)
        for token, route in zip(record["tokens"], routes, strict=True)
    ]
    assert offsets.tolist() == [0, 3, 6, 9, 11]
    assert [[a == b for a in keys.tolist()] for b in keys.tolist()] == [[a == b for a in pairs] for b in pairs]
    assert dataset.copies() == []


@pytest.mark.parametrize(("layout", "num_tokens"), [("tree", [6, 2]), ("joined", [8]), ("packed", [3, 3, 3, 2])])
def test_every_layout_keeps_the_routes_of_each_branch(layout: Layout, num_tokens: list[int]) -> None:
    tasks = group_by_task(render([decode(record) for record in RECORDS]))
    batch = make_batch(tasks, layout)
    assert [forest.num_tokens for forest in batch.forests] == num_tokens
    branches = [
        [None] * forest.branch_length[branch]
        if forest.routed_experts is None
        else forest.routed_experts[forest.path(branch)].tolist()
        for forest in batch.forests
        for branch in range(forest.num_branches)
    ]
    assert branches[:3] == SORTED
    assert branches[3] in ([None, None], [NONE, NONE])


def test_equal_hashes_of_different_pairs_do_not_merge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seeds = np.random.default_rng, []

    class Zeros:
        def integers(self, low: int, high: int, size: int, dtype: type) -> np.ndarray:
            return np.zeros(size, dtype)

    def first_collides(seed: int) -> object:
        seeds.append(seed)
        return Zeros() if seed == 0 else real(seed)

    monkeypatch.setattr(np.random, "default_rng", first_collides)
    # With equal factors, the sums of these pairs are equal.
    merged = merge_routes(np.array([1, 2], np.int32), [as_routes([[[1]]], 1), as_routes([[[0]]], 1)], [1, 1])
    assert merged.ids[0] != merged.ids[1]
    assert seeds == [0, 1]
