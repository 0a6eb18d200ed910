"""The trajectories of an agent trace, on traces made by hand and on random trees."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.traces import Record, answer, linked, message, run
from treering.data import AgentTrace, Trajectory
from treering.data.formats.adapters.verifiers import decode_trace
from treering.errors import InputError
from treering.tree.forest import Forest


def tokens_of(trajectories: list[Trajectory]) -> list[list[int]]:
    return [trajectory.tokens.tolist() for trajectory in trajectories if trajectory.tokens is not None]


def test_branches_and_further_roots_are_trajectories_in_the_order_of_their_leaves() -> None:
    # Two answers to one question; a sub-agent with its own prompt; a continuation of the first answer.
    trace = decode_trace(
        run(
            message(None, [1]),
            answer(0, [2], [3]),
            answer(0, [2], [4]),
            message(None, [9]),
            answer(3, [2], [5]),
            linked(answer(1, [6], [7]), (4, "subagent_return")),
        )
    )
    assert trace.paths() == [(0, 2), (3, 4), (0, 1, 5)]
    assert tokens_of(trace.trajectories()) == [[1, 2, 4], [9, 2, 5], [1, 2, 3, 6, 7]]
    assert not trace.left_out()


def test_a_compaction_is_trained_only_if_the_agent_went_on_from_it() -> None:
    # Nodes 2 and 3 are attempts to summarise the same history; the new root continues from the second.
    nodes = [
        message(None, [1]),
        answer(0, [2], [3]),
        linked(answer(1, [4], [5]), (1, "compaction_attempt")),
        linked(answer(1, [4], [6]), (1, "compaction_attempt")),
        message(None, [7]),
        linked(answer(4, [2], [8]), (3, "compaction")),
    ]
    trace = decode_trace(run(*nodes))
    assert tokens_of(trace.trajectories()) == [[1, 2, 3, 4, 6], [7, 2, 8]]
    assert trace.left_out() == {"rejected compaction": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"agent": {"name": "judge", "trainable": False}}, "untrainable agent"),
        ({"ok": False, "errors": [{"type": "ProviderError", "message": "503"}]}, "failed run"),
    ],
)
def test_judges_and_failed_runs_are_not_trained(fields: Record, reason: str) -> None:
    trace = decode_trace(run(message(None, [1]), answer(0, [], [2]), answer(0, [], [3]), **fields))
    assert (trace.trajectories(), trace.left_out()) == ([], {reason: 2})


def test_an_attempt_repeated_with_success_is_trained() -> None:
    trace = decode_trace(run(message(None, [1]), answer(0, [], [2]), ok=True, errors=[{"type": "E", "message": "m"}]))
    assert trace.num_trajectories == 1


def test_a_path_without_sampled_tokens_is_left_out() -> None:
    trace = decode_trace(run(message(None, [1]), answer(0, [], [2]), message(0, [3])))
    assert tokens_of(trace.trajectories()) == [[1, 2]]
    assert trace.left_out() == {"nothing sampled": 1}


def test_a_message_without_tokens_whose_tokens_stand_in_the_next_node_is_read() -> None:
    # A server that returns a prompt's ids without their messages puts all of them into the answer.
    trace = decode_trace(run(message(None, []), message(0, []), answer(1, [1, 2], [3]), answer(2, [], [4])))
    assert tokens_of(trace.trajectories()) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([message(None, []), answer(0, [], [])], 0),
        ([message(None, [1]), answer(0, [], [])], 1),
        ([message(None, [1]), answer(0, [2], [3]), message(1, []), answer(2, [], [4])], 2),
        ([message(None, []), answer(0, [], [4])], 0),
    ],
)
def test_a_trained_path_without_the_tokens_of_a_message_is_refused_with_what_to_do(
    nodes: list[Record], named: int
) -> None:
    with pytest.raises(InputError, match=rf"^nodes\[{named}\] has no token_ids.*never rendered again.*client.type"):
        decode_trace(run(*nodes))


def test_nodes_without_tokens_are_no_matter_where_nothing_is_trained() -> None:
    record = run(message(None, []), answer(0, [], []), agent={"trainable": False})
    assert decode_trace(record).trajectories() == []


def test_without_recorded_logprobs_a_trajectory_has_none_and_a_path_with_some_is_refused() -> None:
    question, first = message(None, [1]), answer(0, [2], [3], logprobs=[])
    [found] = decode_trace(run(question, first)).trajectories()
    assert found.logprobs is None
    with pytest.raises(InputError, match=r"nodes\[1\] has none"):
        decode_trace(run(question, first, answer(1, [4], [5])))


def test_advantages_of_nodes_pass_through_and_nodes_without_any_count_as_zero() -> None:
    nodes = [message(None, [1]), answer(0, [2], [3, 4], advantages=[0.5, -2.0]), answer(1, [5], [6])]
    [found] = decode_trace(run(*nodes)).trajectories()
    assert found.advantages.tolist() == [0, 0, 0.5, -2.0, 0, 0]


def forked() -> AgentTrace:
    return decode_trace(
        run(message(None, [1]), answer(0, [2], [3, 4]), answer(1, [5], [6]), answer(1, [5], [7]), reward=1)
    )


def test_advantages_per_token_go_to_the_sampled_tokens_of_the_nodes() -> None:
    unread = float("nan")
    shared = [unread, unread, 0.25, -0.75, unread]
    trace = forked().with_advantages([[*shared, 1.5], np.array([*shared, -3.0])])
    found = [None if node.advantages is None else node.advantages.tolist() for node in trace.nodes]
    assert found == [None, [0.25, -0.75], [1.5], [-3.0]]
    assert [t.advantages.tolist() for t in trace.trajectories()] == [
        [0, 0, 0.25, -0.75, 0, 1.5],
        [0, 0, 0.25, -0.75, 0, -3.0],
    ]


def test_one_advantage_per_trajectory_goes_to_all_of_its_sampled_tokens() -> None:
    trace = forked().with_advantages([0.5] * 2)
    assert [t.advantages.tolist() for t in trace.trajectories()] == [[0, 0, 0.5, 0.5, 0, 0.5]] * 2


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ([1.0], "got 1 for 2;"),
        ([1.0, [1.0] * 5], r"advantages\[1\] is one number or one per token \(6\), got shape \(5,\)"),
        ([1.0, 2.0], r"nodes\[1\] is shared .* advantages\[1\].*tree_advantages"),
        ([1.0, float("inf")], r"advantages\[1\] must be finite .* nodes\[1\]"),
    ],
)
def test_advantages_that_do_not_fit_the_nodes_are_refused(advantages: list[Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        forked().with_advantages(advantages)


def test_advantages_leave_the_given_trace_and_nodes_that_are_not_trained_alone() -> None:
    attempt = linked(answer(0, [], [4], advantages=[9.0]), (1, "compaction_attempt"))
    trace = decode_trace(run(message(None, [1]), answer(0, [], [3]), attempt))
    scored = trace.with_advantages([2.0])
    assert [node.advantages is None for node in trace.nodes] == [True, True, False]
    assert [None if node.advantages is None else node.advantages.tolist() for node in scored.nodes] == [
        None,
        [2.0],
        [9.0],
    ]


@st.composite
def trees(draw: st.DrawFn) -> list[Record]:
    """Draw nodes of a random forest in random order, over few tokens, so that siblings often begin alike."""
    num_nodes = draw(st.integers(1, 9))
    parents = [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(num_nodes)]
    order = draw(st.permutations(range(num_nodes)))
    nodes: list[Record] = [{}] * num_nodes
    for i, parent in enumerate(parents):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        logprobs = draw(st.lists(st.floats(-20, 0), min_size=sum(mask), max_size=sum(mask)))
        nodes[order[i]] = {
            **message(None if parent is None else order[parent], tokens),
            **{"mask": mask, "logprobs": logprobs, "sampled": any(mask)},
        }
    return nodes


def branches_of(nodes: list[Record]) -> list[list[int]]:
    """Return the paths to each leaf, found from the roots down."""
    children: dict[int | None, list[int]] = {}
    for i, node in enumerate(nodes):
        children.setdefault(node["parent"], []).append(i)
    found, open_paths = [], [[root] for root in children[None]]
    while open_paths:
        path = open_paths.pop()
        below = children.get(path[-1], [])
        open_paths += [[*path, child] for child in below]
        found += [] if below else [path]
    sampled = [path for path in found if any(any(nodes[i]["mask"]) for i in path)]
    return sorted(sampled, key=lambda path: path[-1])


@given(trees())
def test_the_forest_of_all_trajectories_walks_back_to_the_nodes(nodes: list[Record]) -> None:
    branches = branches_of(nodes)
    trajectories = decode_trace(run(*nodes)).trajectories()
    assert len(trajectories) == len(branches)
    if not branches:
        return
    forest = Forest.from_sequences(tokens_of(trajectories))
    for k, (branch, found) in enumerate(zip(branches, trajectories, strict=True)):
        walked, mask, logprobs = forest.tokens[forest.path(k)].tolist(), [], []
        for i in branch:
            values = iter(nodes[i]["logprobs"])
            mask += nodes[i]["mask"]
            logprobs += [next(values) if is_sampled else 0.0 for is_sampled in nodes[i]["mask"]]
        assert walked == [token for i in branch for token in nodes[i]["token_ids"]]
        assert found.loss_mask.tolist() == mask
        assert (found.logprobs.tolist() if found.logprobs is not None else [0.0] * len(mask)) == logprobs


@given(trees(), st.randoms(use_true_random=False))
def test_advantages_read_back_from_the_nodes_are_those_that_were_given(nodes: list[Record], random: Any) -> None:
    trace = decode_trace(run(*nodes))
    of_node = [np.array([random.uniform(-1, 1) for _ in node["token_ids"]]) for node in nodes]
    given = [np.concatenate([of_node[i] for i in path]) for path in branches_of(nodes)]
    scored = trace.with_advantages(given).trajectories()
    for values, found in zip(given, scored, strict=True):
        assert found.advantages.tolist() == np.where(found.loss_mask, values, 0.0).tolist()
