"""Draft trees in the embedded engine: drafts of any content and shape change no token (law 5)."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.speculation.scripted_drafts import Script, ScriptedDrafter, Tree, chain, make_drafts
from tests.engine.test_torch_engine import Rollouts, assert_same, group_requests, run
from tests.models import VOCAB, build, build_float64
from treering.engine.batch.step_inputs import MOST_DRAFTS, clip_drafts, count_accepted
from treering.engine.batch.token_batch import PER_TOKEN, TokenBatch, of_sequence
from treering.engine.torch_engine import TorchEngine
from treering.errors import StateError

STOP = 7
NUM_PROMPTS = 5


def requests_of(max_tokens: int = 20) -> list:
    return group_requests(NUM_PROMPTS, 3, stop_tokens=(STOP,), max_tokens=max_tokens)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Rollouts:
    return run(TorchEngine(model, max_batch=1, backend="plain"), requests_of())


class Truth:
    """Correct continuations: the tokens sampled by the engine without drafts."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def after(self, prompt_id: str, so_far: Sequence[int]) -> list[int]:
        """Return the continuation of the first rollout with this beginning, plus tokens after its end."""
        for (prompt, _, _), rollout in self._rollouts.items():
            if prompt == prompt_id and rollout.tokens[: len(so_far)].tolist() == list(so_far):
                return [*rollout.tokens[len(so_far) :].tolist(), 3, 4, 5]
        raise AssertionError(f"{prompt_id} never began with {so_far}")


def right_last(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    """Draft wrong first tokens with children, then the right path with each token between wrong siblings."""
    tokens, parents = [(right[0] + 1) % VOCAB, (right[0] + 2) % VOCAB, right[0], right[1]], [-1, -1, 0, 0]
    following = -1
    for token in right[:5]:
        tokens += [(token + 5) % VOCAB, token, (token + 9) % VOCAB]
        parents += [following] * 3
        following = len(tokens) - 2
    return tokens[:max_drafts], parents[:max_drafts]


def random_tree(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    """Draft a random tree of up to 24 nodes; half of the children of right nodes are right."""
    tokens, parents, depths = [], [], [0]
    taken = set()
    for _ in range(int(rng.integers(0, min(max_drafts, 24) + 1))):
        parent = int(rng.integers(-1, len(tokens)))
        depth = depths[parent + 1]
        token = right[depth] if rng.random() < 0.5 and depth < len(right) else int(rng.integers(VOCAB))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
    return tokens, parents


def right_chain(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    return chain(right[: min(max_drafts, 6)])


def wrong_chain(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    return chain([(token + 1) % VOCAB for token in right[: min(max_drafts, 6)]])


def wide_and_full(right: list[int], rng: np.random.Generator, max_drafts: int) -> Tree:
    """Draft as many nodes as allowed, the right ones last, so that every slot of the row is written."""
    others = [token for token in range(VOCAB) if token != right[0]][: max(0, min(max_drafts, MOST_DRAFTS) - 2)]
    return [*others, *right[:2]][:max_drafts], [*[-1] * (len(others) + 1), len(others)][:max_drafts]


CASES = [
    (right_chain, "fused", 1),
    (wrong_chain, "fused", 16),
    (right_last, "plain", 7),
    (right_last, "fused", 16),
    (random_tree, "fused", 16),
    (random_tree, "plain", 1),
    (wide_and_full, "fused", 7),
]


def script_of(shape, truth: Truth) -> Script:
    rng = np.random.default_rng(0)
    return lambda prompt_id, so_far, max_drafts: shape(truth.after(prompt_id, so_far), rng, max_drafts)


@pytest.mark.parametrize(("shape", "backend", "max_batch"), CASES)
def test_the_shape_of_drafts_changes_no_token(
    model: PreTrainedModel, plain: Rollouts, shape, backend: str, max_batch: int
) -> None:
    requests = requests_of()
    np.random.default_rng(max_batch).shuffle(requests)
    drafter = ScriptedDrafter(script_of(shape, Truth(plain)))
    engine = TorchEngine(model, drafter, max_batch=max_batch, backend=backend)
    assert_same(run(engine, requests), plain)
    assert engine.stats.num_drafted > 0
    assert (engine.stats.acceptance < 0.05) == (shape is wrong_chain)
    assert engine.stats.num_sampled == sum(rollout.num_tokens for rollout in plain.values())


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_a_limit_inside_a_tree_ends_the_rollout_there(model: PreTrainedModel, plain: Rollouts, max_tokens: int) -> None:
    expected = run(TorchEngine(model), requests_of(max_tokens))
    engine = TorchEngine(model, ScriptedDrafter(script_of(right_last, Truth(plain))), max_batch=4)
    assert_same(run(engine, requests_of(max_tokens)), expected)


def test_a_tree_larger_than_its_rows_slots_does_not_change_other_rows(model: PreTrainedModel, plain: Rollouts) -> None:
    """The arena is exactly full, and the script drafts 64 tokens even if there are fewer slots."""
    truth = Truth(plain)
    num_slots = sum(range(NUM_PROMPTS)) + NUM_PROMPTS * 3 * 20

    def greedy(prompt_id: str, so_far: list[int], max_drafts: int) -> Tree:
        return wide_and_full(truth.after(prompt_id, so_far), np.random.default_rng(0), MOST_DRAFTS + 20)

    engine = TorchEngine(model, ScriptedDrafter(greedy), max_batch=15, max_tokens=num_slots)
    assert_same(run(engine, requests_of()), plain)
    assert engine.stats.num_rows > engine.stats.num_forwards


def test_feedback_has_accepted_counts_and_leaves(model: PreTrainedModel, plain: Rollouts) -> None:
    drafter = ScriptedDrafter(script_of(right_last, Truth(plain)))
    engine = TorchEngine(model, drafter, max_batch=4)
    run(engine, requests_of())
    num_walked = num_stops = 0
    feedback = [step for step in drafter.seen if "accepted" in step]
    assert [step for step in drafter.seen if step["drafts"].tokens.size] == feedback
    for step in feedback:
        drafts = step["drafts"]
        for row, (accepted, leaf) in enumerate(zip(step["accepted"], step["leaves"], strict=True)):
            leader = step["leaders"][row]
            own = slice(drafts.offsets[leader], drafts.offsets[leader + 1])
            parents, depth, at = drafts.parents[own], 0, int(leaf)
            while at >= 0:
                at, depth = int(parents[at]), depth + 1
            assert depth == accepted
            num_walked += depth
            num_stops += leaf >= 0 and drafts.tokens[own][leaf] == STOP
    # A drafted stop token is sampled but never computed, so the engine does not count it.
    assert num_walked - num_stops == engine.stats.num_accepted > 0
    assert num_stops > 0
    assert any((step["leaves"] > step["accepted"]).any() for step in feedback)
    assert all(step["ended"] is None for step in feedback)


def test_drafts_are_clipped_to_the_first_valid_tokens_that_fit() -> None:
    # A chain with an unknown token, a tree with a negative one, an empty tree, a tree clipped to two, a wide tree.
    trees = [
        chain([1, 9, 2]),
        ([3, 4, 5, -1, 6], [-1, 0, -1, 0, -1]),
        chain([]),
        ([1, 2, 3], [-1, -1, 0]),
        ([1, 2, 3, 4], [-1, 0, -1, 2]),
    ]
    laid = clip_drafts(make_drafts(trees), np.array([5, 5, 5, 2, 5]), 9)
    assert laid.tokens.tolist() == [1, 3, 4, 5, 1, 2, 1, 2, 3, 4]
    assert laid.offsets.tolist() == [0, 1, 4, 4, 6, 10]
    assert laid.parents.tolist() == [-1, -1, 0, -1, -1, -1, -1, 0, -1, 2]
    assert laid.depths.tolist() == [1, 1, 2, 1, 1, 1, 1, 2, 1, 2]
    assert laid.bits.tolist() == [0, 0, 0, 0b100, 0, 0b10, 0, 0, 0b100, 0b1100]


def test_a_row_has_at_most_64_drafts_and_the_last_bit_counts() -> None:
    bush = (list(range(100)), [-1] * 100)
    laid = clip_drafts(make_drafts([bush, chain(list(range(80)))]), np.array([200, 200]), 1000)
    assert laid.offsets.tolist() == [0, MOST_DRAFTS, 2 * MOST_DRAFTS]
    assert laid.bits[:64].view(np.uint64).tolist() == [0, *(1 << number for number in range(1, 64))]
    assert laid.depths[64:].tolist() == list(range(1, 65))
    assert not laid.bits[64:].any()


def test_stop_tokens_and_their_descendants_are_clipped() -> None:
    # 7 and 8 stop the first row, and 7 has descendants and a sibling; 5 stops the second row.
    trees = [([1, 7, 2, 3, 8, 4], [-1, 0, 1, 0, 3, 3]), chain([4, 5, 6]), chain([7, 5])]
    stop_tokens = np.array([[7, 8], [5, -1], [-1, -1]], np.int32)
    laid = clip_drafts(make_drafts(trees), np.array([9, 9, 9]), 9, stop_tokens)
    assert laid.tokens.tolist() == [1, 3, 4, 4, 7, 5]
    assert laid.offsets.tolist() == [0, 3, 4, 6]
    assert laid.parents.tolist() == [-1, 0, 1, -1, -1, 0]
    assert laid.depths.tolist() == [1, 2, 3, 1, 1, 2]
    assert laid.bits.tolist() == [0] * 6
    assert laid.numbers.tolist() == [0, 3, 5, 0, 0, 1]


@pytest.mark.parametrize(
    ("num_accepted", "leaf", "drawn", "feedback"),
    [
        (1, 0, 7, (2, 1)),  # the clipped stop token
        (1, 0, 9, (1, 0)),
        (2, 1, 8, (3, 4)),  # computed draft 1 is the drafter's draft 3
        (3, 2, 2, (3, 5)),
        (0, -1, 2, (0, -1)),  # 2 was drafted, but at another node
    ],
)
def test_a_clipped_draft_counts_as_accepted_if_it_was_sampled(
    num_accepted: int, leaf: int, drawn: int, feedback: tuple[int, int]
) -> None:
    drafts = make_drafts([chain([6]), ([1, 7, 2, 3, 8, 4], [-1, 0, 1, 0, 3, 3])])
    laid = clip_drafts(drafts, np.array([9, 9]), 9, np.array([[-1, -1], [7, 8]], np.int32))
    contexts = np.array([[5, 9, 0], [5, 5, drawn]], np.int32)
    own, accepted, leaves = np.arange(2), np.array([0, num_accepted]), np.array([-1, leaf])
    counted = count_accepted(drafts, laid, own, contexts, np.array([2, 3]), accepted, leaves)
    assert [values.tolist() for values in counted] == [[0, feedback[0]], [-1, feedback[1]]]


@pytest.mark.parametrize("parents", [[0, -1], [-1, 1], [-2, 0]])
def test_a_token_before_its_parent_is_refused(parents: list[int]) -> None:
    with pytest.raises(StateError, match="row 1 has parents"):
        clip_drafts(make_drafts([chain([1]), ([1, 2], parents)]), np.array([5, 5]), 9)


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_token_of_a_tree_has_the_logits_of_its_branch(backend: str, dtype: torch.dtype) -> None:
    """Compare every node of a random tree of 64 with the model on its context and path."""
    model = build("qwen3").to(dtype).eval()
    rng = np.random.default_rng(3)
    tokens, parents = rng.integers(0, VOCAB, 64), [int(rng.integers(max(-1, j - 5), j)) for j in range(64)]
    context = rng.integers(0, VOCAB, 9)
    logits = logits_of_tree(TorchEngine(model, max_tokens=80, backend=backend), context, tokens, parents)
    for number in range(64):
        path, at = [], number
        while at >= 0:
            path, at = [int(tokens[at]), *path], parents[at]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([[*context.tolist(), *path]])).logits[0, -1]
        torch.testing.assert_close(logits[number], expected, atol=1e-5, rtol=1e-4)


def logits_of_tree(
    engine: TorchEngine, context: np.ndarray, tokens: np.ndarray, parents: list[int], first_slot: int = 5
) -> torch.Tensor:
    """Return the logits after each draft token.

    One pass computes the context, half of it as a prefix, and one the tree.
    """
    num_prefix = context.size // 2
    own_start = first_slot + num_prefix
    engine._decoder.run(of_sequence(context, first_slot=first_slot))
    depths, bits = [0], []
    for number, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << number)
    every = np.ones(tokens.size, np.int64)
    num_own = context.size - num_prefix
    return engine._decoder.run(
        TokenBatch(
            tokens=tokens,
            positions=context.size - 1 + np.array(depths[1:]),
            slots=own_start + num_own + np.arange(tokens.size),
            prefix_start=every * first_slot,
            num_prefix=every * num_prefix,
            own_start=every * own_start,
            num_own=every * num_own,
            tree_start=every * (own_start + num_own),
            tree_bits=np.array(bits, np.uint64).view(np.int64),
            wanted=np.arange(tokens.size),
        )
    )


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_slots_move_in_order_so_that_a_slot_may_be_source_and_target(backend: str) -> None:
    """Compact a chain whose tokens were computed with gaps."""
    model = build_float64("qwen3").eval()
    engine = TorchEngine(model, max_tokens=80, backend=backend)
    context, path = np.arange(9), [4, 6, 8]
    tokens = np.array([11, 12, 13, 14, 15, 16, 17, 18, 19, 20])
    parents = [-1, -1, -1, -1, -1, -1, 4, -1, 6, -1]
    logits_of_tree(engine, context, tokens, parents)
    first = 5 + context.size
    engine._decoder.move(first + np.array(path), first + np.arange(3))
    num_seen = context.size + 4
    last = {name: getattr(of_sequence(np.full(num_seen, 21), first_slot=5), name)[-1:] for name in PER_TOKEN}
    logits = engine._decoder.run(TokenBatch(**last, wanted=np.zeros(1, np.int64)))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[*range(9), 15, 17, 19, 21]])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-10, rtol=0)
