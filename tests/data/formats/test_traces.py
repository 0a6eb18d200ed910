"""Files of verifiers v1 traces: what is read, what is refused and where, and that writing back loses nothing."""

import gzip
import hashlib
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.traces import Record, answer, linked, message, run
from treering.data import read_traces, write_traces
from treering.data.formats.adapters.verifiers import (
    TraceTally,
    decode_trace,
    decode_traces,
    encode_trace,
    looks_like_trace,
)
from treering.errors import DataWarning, InputError

NODES = (message(None, [1]), answer(0, [2], [3]))
POLICY = {"start": 6, "end": 7}
EPISODE: Record = {
    "id": "e",
    "task": {"type": "Task", "data": {}, "key": "shared"},
    "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 7, "policy": POLICY}},
    "traces": [run(*NODES, id="solver"), run(*NODES, id="judge", agent={"name": "judge", "trainable": False})],
    "num_input_tokens": 3,
}


def write(path: Path, *records: Record) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"task_id": 1, "messages": []},
        {"nodes": [{"id": 3}]},
        {"traces": [{"messages": []}]},
        {"prompt": [], "completion": [], "task": "default"},
        [],
        None,
    ],
)
def test_other_records_do_not(record: object) -> None:
    assert not looks_like_trace(record)
    with pytest.raises(InputError, match="has nodes and an episode has traces"):
        decode_traces(record)


@pytest.mark.filterwarnings("ignore::treering.errors.DataWarning")
def test_a_line_is_an_episode_or_a_run(tmp_path: Path) -> None:
    solver, judge, alone = read_traces(write(tmp_path / "traces.jsonl", EPISODE, run(*NODES)))
    assert [trace.num_trajectories for trace in (solver, judge, alone)] == [1, 0, 1]
    assert (solver.step, solver.version, alone.step, alone.version) == (7, 6, None, None)
    assert solver.episode is judge.episode
    assert alone.episode is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"a": {"score": 1, "weight": 0.5}, "b": {"score": -2.0}, "c": None}, 1 * 0.5 + -2.0 * 1),
        ({"a": None}, None),
        ({}, None),
    ],
)
def test_the_reward_is_the_sum_of_weighted_scores_and_unknown_if_nothing_was_scored(
    rewards: Record, expected: float | None
) -> None:
    assert decode_trace(run(*NODES, rewards=rewards)).reward == expected


def test_the_task_is_its_key_else_its_hash_else_the_hash_of_its_data() -> None:
    data = {"prompt": "Zürich", "idx": 3}
    # sha256 over JSON with sorted keys, verifiers' `task_key`.
    hashed = hashlib.sha256(b'{"idx": 3, "prompt": "Z\\u00fcrich"}').hexdigest()
    tasks = [{"key": "k", "hash": "h", "data": data}, {"key": None, "hash": "h", "data": data}, {"data": data}]
    assert [decode_trace(run(*NODES, task=task)).task_id for task in tasks] == ["k", "h", hashed]
    episode = {**EPISODE, "traces": [run(*NODES, task=None)]}
    assert [trace.task_id for trace in decode_traces(episode)] == ["shared"]
    with pytest.raises(InputError, match=r"task\.key, task\.hash or task\.data"):
        decode_trace(run(*NODES, task={"type": "Task"}))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([message(None, [1], mask=[])], r"nodes\[0\]: mask has one entry per token, got 0 for 1"),
        (
            [NODES[0], answer(0, [2], [3], logprobs=[-1.0, -2.0])],
            r"nodes\[1\]: logprobs has one entry per True .* 2 for 1",
        ),
        ([NODES[0], answer(0, [2], [3], advantages=[])], r"nodes\[1\]: advantages has one entry per True"),
        ([NODES[0], answer(0, [2], [3], logprobs=[None])], r"nodes\[1\]: logprobs\[0\] must be a number, got None"),
        ([NODES[0], answer(0, [2], [3], logprobs=[float("nan")])], r"nodes\[1\]: logprobs must be finite"),
        ([message(None, [-1])], r"nodes\[0\]: token_ids\[0\] must be an integer"),
        ([message(None, [1], mask=[1])], r"nodes\[0\]: mask\[0\] must be true or false, got 1"),
        ([message("0", [1])], r"nodes\[0\]: parent must be an integer, got '0'"),
        ([message(None, [1], semantic_parents=[{"node": 0}])], r"nodes\[0\]: semantic_parents\[0\] has a node and a"),
        ([NODES[0], answer(0, [], [])], r"nodes\[1\] has no token_ids"),
        ([message(1, [1]), answer(0, [2], [3])], r"nodes\[0\] is its own ancestor"),
        ([message(None, [1]), answer(1, [], [2])], r"nodes\[1\] is its own ancestor"),
        ([message(None, [1]), answer(2, [], [2])], r"nodes\[1\].parent must be an index of 2 nodes, got 2"),
        ([message(None, [1]), answer(-1, [], [2])], r"nodes\[1\].parent must be an index of 2 nodes, got -1"),
        ([linked(NODES[0], (5, "compaction"))], r"nodes\[0\].semantic_parents must be an index .* got 5"),
        ([NODES[0], answer(0, [2], [3], loss_weights={"ce": [1.0, 0.5]})], r"nodes\[1\]: loss_weights changes .*'ce'"),
        (
            [message(None, [1], message={"content": [{"type": "image_url"}]}), NODES[1]],
            r"nodes\[0\]: .*image_url.*trains on text",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_file_line_trace_and_node(
    tmp_path: Path, nodes: list[Record], expected: str
) -> None:
    file = write(tmp_path / "traces.jsonl", run(*NODES), {**EPISODE, "traces": [run(*NODES), run(*nodes)]})
    with pytest.raises(InputError, match=rf"^{file}:2: traces\[1\]: {expected}"):
        read_traces(file)


@pytest.mark.parametrize(("content", "expected"), [("", "got 0 in 0 lines"), ("{", ":1: a JSON document holds")])
def test_a_file_without_traces_and_a_broken_line_are_refused(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=expected):
        read_traces(file)


def test_what_is_left_out_is_counted_and_said_once(tmp_path: Path) -> None:
    attempt = linked(answer(0, [2], [4]), (1, "compaction_attempt"))
    file = write(tmp_path / "traces.jsonl", EPISODE, run(*NODES, attempt, attempt), {**EPISODE, "traces": []})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traces = read_traces(file)
    assert len(traces) == 3
    assert [str(warning.message) for warning in caught] == [
        f"{file}: 1 episode without traces is left out",
        f"{file}: 3 of 5 paths are not trained (rejected compaction 2, untrainable agent 1)",
    ]
    assert {warning.category for warning in caught} == {DataWarning}


@pytest.mark.parametrize(
    ("logprobs", "is_said"),
    [([-0.1235, -2.0], True), ([-0.1235, -2.00001], False), ([0.0, 0.0], False), ([], False)],
)
def test_logprobs_of_four_decimals_are_said_with_their_cost(logprobs: list[float], *, is_said: bool) -> None:
    traces = [decode_trace(run(NODES[0], answer(0, [2], [3, 4], logprobs=logprobs)))]
    tally = TraceTally()
    tally.add(traces)
    [found] = traces[0].trajectories()
    assert found.logprobs is None if not logprobs else found.logprobs.tolist() == [0, 0, *logprobs]
    assert [note.startswith("log-probs are rounded to 4 decimals") for note in tally.notes()] == [True] * is_said
    assert all("5e-5" in note for note in tally.notes())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def lines(draw: st.DrawFn) -> list[Record]:
    """Write runs and episodes with unknown fields, of one to three nodes each."""
    extra = st.dictionaries(st.text(min_size=1).map("x_".__add__), json_values, max_size=2)
    ids, floats = st.integers(0, 2**31 - 1), st.floats(-1e3, 0)
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = [message(None, draw(st.lists(ids, min_size=1, max_size=3)), **draw(extra))]
        for parent in range(draw(st.integers(0, 2))):
            sampled = draw(st.lists(ids, min_size=1, max_size=3))
            given = st.lists(floats, min_size=len(sampled), max_size=len(sampled))
            fields = {"logprobs": draw(given), "advantages": draw(st.none() | given)}
            nodes.append(answer(parent, [5], sampled, **fields, **draw(extra)))
        runs.append(run(*nodes, **draw(extra)))
    return [*runs[1:], {**EPISODE, "traces": runs[:1], **draw(extra)}]


@pytest.mark.filterwarnings("ignore::treering.errors.DataWarning")
@given(lines(), st.sampled_from(["traces.jsonl", "traces.jsonl.gz"]))
def test_writing_what_was_read_gives_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], name: str
) -> None:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder / name, read_traces(write(folder / "given.jsonl", *records)))
    content = (folder / name).read_bytes()
    written = gzip.decompress(content) if name.endswith(".gz") else content
    # Compared as text with sorted keys, because 1, 1.0 and true are equal in Python but not in JSON.
    assert [json.dumps(json.loads(line), sort_keys=True) for line in written.splitlines()] == [
        json.dumps(record, sort_keys=True) for record in records
    ]


def test_an_episode_stays_on_one_line_with_its_advantages_and_halves_of_pairs(tmp_path: Path) -> None:
    question = message(None, [1], message={"role": "tool", "content": "\ud83d"})
    episode = {**EPISODE, "traces": [run(question, NODES[1]), EPISODE["traces"][1]]}
    solver, judge = decode_traces(episode)
    write_traces(tmp_path / "scored.jsonl", [solver.with_advantages([1 / 3]), judge])
    scored = {**episode, "traces": [run(question, {**NODES[1], "advantages": [1 / 3]}), episode["traces"][1]]}
    assert json.loads((tmp_path / "scored.jsonl").read_text()) == scored


def test_absent_fields_of_a_node_stay_absent() -> None:
    # verifiers omits fields that are None when it writes an episode.
    nodes = [{"token_ids": [1], "mask": [False]}, {"parent": 0, "sampled": True, "token_ids": [2], "mask": [True]}]
    assert encode_trace(decode_trace(run(*nodes))) == run(*nodes)
