"""Law 2 for distillation: loss and gradients equal those of flat sequences, for every teacher and computation."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.forests import SHAPES
from tests.models import assert_gradients_equal, build, build_float64, global_norm, take_gradients
from tests.train.objectives.cases import CASES
from tests.train.objectives.flat_distill import Setting, flat_divergences, flat_loss
from tests.train.objectives.flat_objectives import Data, Flat, data_of, datas, over_tokens, run_flat
from treering.errors import ConfigError, InputError
from treering.model import edges
from treering.model.divergence import Divergence, divergence_rows
from treering.model.teacher import TeacherStates, TeacherTopK, score
from treering.objectives import distill, dpo, sft
from treering.train.step import BackwardResult, backward
from treering.tree.forest import Forest

EXACT = 1e-10
STUDENT = build_float64()
TEACHER = build_float64("llama", seed=5, hidden_size=48, num_hidden_layers=1)
SHAPED = [SHAPES["bushy"][:6], SHAPES["prefixes of each other"], SHAPES["duplicates"], [[3]]]
SETTINGS = {
    "forward_kl": Setting(),
    "reverse_kl once": Setting(kind="reverse_kl", shared="once"),
    "jsd": Setting(kind="jsd", normalizer="sequence_mean"),
    "jsd 0.1 once, 0.6": Setting(kind="jsd", beta=0.1, shared="once", temperature=0.6),
    "forward_kl top 3": Setting(top_k=3),
    "reverse_kl top 1, 1.5": Setting(kind="reverse_kl", top_k=1, temperature=1.5),
    "jsd top 31 once": Setting(kind="jsd", beta=0.8, top_k=31, shared="once", normalizer="sum"),
}


def forests_of(data: Data) -> list[Forest]:
    return [Forest.from_sequences(group) for group in data.groups]


def assert_distills_exactly(
    data: Data,
    setting: Setting,
    max_tokens: int | None = None,
    *,
    student: nn.Module = STUDENT,
    teacher: nn.Module = TEACHER,
) -> BackwardResult:
    expected = flat_loss(student, teacher, data, setting)
    if expected.requires_grad:
        expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(student)
    result = backward(student, forests_of(data), setting.objective(teacher, data), max_tokens)
    assert result.loss == pytest.approx(expected.item(), rel=EXACT, abs=EXACT)
    assert_gradients_equal(take_gradients(student), gradients, EXACT)
    assert all(weight.grad is None for weight in teacher.parameters())
    return result


@pytest.fixture(autouse=True)
def clean_gradients() -> Iterator[None]:
    yield
    STUDENT.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", SETTINGS)
@given(data=datas(STUDENT))
@settings(max_examples=4)
def test_distillation_equals_its_flat_version(name: str, data: Data) -> None:
    assert_distills_exactly(data, SETTINGS[name])


@pytest.mark.parametrize(("name", "is_cut"), [*((name, True) for name in SETTINGS), ("jsd 0.1 once, 0.6", False)])
def test_it_does_so_in_partitions_and_micro_batches(name: str, is_cut: bool) -> None:
    data = data_of(SHAPED, STUDENT, seed=8)
    max_tokens = 12 if is_cut else max(forest.num_tokens for forest in forests_of(data))
    result = assert_distills_exactly(data, SETTINGS[name], max_tokens)
    assert result.plan.num_micro_batches > 1
    assert bool(result.plan.partitioned) == is_cut


@pytest.mark.parametrize(("rows", "softcap"), [(1, False), (5, True)])
@pytest.mark.parametrize("name", ["jsd 0.1 once, 0.6", "reverse_kl top 1, 1.5"])
def test_chunks_of_rows_change_nothing(name: str, rows: int, softcap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    student = build_float64("gemma2") if softcap else STUDENT
    monkeypatch.setattr(edges, "MAX_LOGIT_ENTRIES", {"cpu": 2 * rows * 32})
    data = data_of(SHAPED[:2], student, seed=3)
    assert_distills_exactly(data, SETTINGS[name], student=student, teacher=build_float64("gemma2", seed=2))


@pytest.mark.parametrize(("family", "tied"), [("gemma2", True), ("granite", True), ("qwen3_moe", False)])
def test_tied_heads_softcaps_divisors_and_experts_are_exact(family: str, tied: bool) -> None:
    student, teacher = (build_float64(family, seed, tie_word_embeddings=tied) for seed in (0, 1))
    data = data_of([SHAPES["long segments"]], student, seed=2)
    assert_distills_exactly(data, Setting(kind="reverse_kl"), 40, student=student, teacher=teacher)


@pytest.mark.parametrize(("max_tokens", "rows"), [(None, 1), (12, 10**6)])
def test_lora_is_exact_with_an_adapted_head_too(
    max_tokens: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "MAX_LOGIT_ENTRIES", {"cpu": rows * 64})
    config = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    student = get_peft_model(build_float64(seed=4), config).double()
    assert_distills_exactly(data_of(SHAPED[:2], student, seed=4), Setting(kind="jsd"), max_tokens, student=student)


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_given_scores_are_those_of_the_model(max_tokens: int | None) -> None:
    data = data_of(SHAPED, STUDENT, seed=9)
    given = []
    for forest in forests_of(data):
        scores = score(TEACHER, forest, top_k=4, temperature=0.8)
        assert isinstance(scores, TeacherTopK)
        given += scores.of_branches(forest)
    objective = distill(given, "jsd", temperature=0.8, loss_masks=data.masks)
    expected = flat_loss(STUDENT, TEACHER, data, Setting(kind="jsd", top_k=4, temperature=0.8))
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(STUDENT)
    result = backward(STUDENT, forests_of(data), objective, max_tokens)
    assert result.loss == pytest.approx(expected.item(), rel=EXACT)
    assert_gradients_equal(take_gradients(STUDENT), gradients, EXACT)


@pytest.mark.parametrize(("name", "max_tokens"), [("sft once", 12), ("gspo as in its paper", None), ("gspo sum", 12)])
def test_a_divergence_is_added_to_another_loss_by_weight(name: str, max_tokens: int | None) -> None:
    data = data_of(SHAPED, STUDENT, seed=7)
    base = CASES[name].make(data)
    flat: Flat = run_flat(STUDENT, data, value_head=nn.Linear(32, 1).double(), temperature=0.7)
    rows = flat_divergences(STUDENT, TEACHER, data, Setting(kind="reverse_kl", temperature=0.7))
    weighting = base.weighting
    divergence = over_tokens(
        data, lambda i, t: rows[i][t - 1], normalizer=weighting.normalizer, shared=weighting.shared
    )
    expected = CASES[name].loss(data, flat) + 0.3 * divergence
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = take_gradients(STUDENT)
    objective = distill(TEACHER, "reverse_kl", added_to=base, weight=0.3)
    result = backward(STUDENT, forests_of(data), objective, max_tokens, temperature=0.7)
    assert result.loss == pytest.approx(expected.item(), rel=EXACT)
    assert_gradients_equal(take_gradients(STUDENT), gradients, EXACT)
    assert result.averages["divergence"] > 0


def test_chunks_hold_no_logits_of_either_model(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, num_rows = 1000, 200
    monkeypatch.setattr(edges, "MAX_LOGIT_ENTRIES", {"cpu": 8 * vocab})
    head, teacher_head = nn.Linear(6, vocab, bias=False), nn.Linear(5, vocab, bias=True)
    rows = torch.randn(num_rows, 6, requires_grad=True)
    hidden = torch.randn(num_rows, 5)
    teacher = TeacherStates(hidden=hidden, head=teacher_head, softcap=None, logit_divisor=1.0, num_logits=vocab)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = divergence_rows(rows, head, teacher, Divergence(kind="jsd"), vocab_size=vocab)
    assert out.shape == (num_rows,)
    assert sum(saved.values()) / 4 <= rows.numel() + head.weight.numel() < num_rows * vocab


@pytest.mark.parametrize("teacher", [TEACHER, build_float64("granite", seed=5)], ids=["llama", "granite"])
def test_a_score_is_of_what_follows_each_token(teacher: nn.Module) -> None:
    sequences = SHAPES["prefixes of each other"]
    forest = Forest.from_sequences(sequences)
    top = score(teacher, forest, top_k=3)
    states = score(teacher, forest)
    assert isinstance(top, TeacherTopK)
    assert isinstance(states, TeacherStates)
    for branch, sequence in enumerate(sequences):
        logprobs = teacher(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
        path = torch.from_numpy(forest.path(branch)).long()
        torch.testing.assert_close(top.logprobs[path], logprobs.sort(-1, descending=True).values[:, :3])
        torch.testing.assert_close(top.ids[path], logprobs.argsort(-1, descending=True)[:, :3])
        full = states.take(path).target(slice(None), 1.0, like=logprobs).logprobs
        torch.testing.assert_close(full, logprobs)
        ids, _ = top.of_branches(forest)[branch]
        assert ids[1:].tolist() == top.ids[path][:-1].tolist()


def distance(seed: int, kind: str, path: str) -> float:
    """Return the distance of the whole bfloat16 gradient, tree or flat, from the float32 one."""
    student, teacher = build(seed=seed), build("llama", seed=seed + 100)
    data = data_of([SHAPES["long segments"]], student, seed=seed)
    setting = Setting(kind=kind)
    flat_loss(student, teacher, data, setting).backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(student)
    student, teacher = student.bfloat16(), teacher.bfloat16()
    if path == "tree":
        backward(student, forests_of(data), setting.objective(teacher, data))
    else:
        flat_loss(student, teacher, data, setting).backward()  # type: ignore[no-untyped-call]
    actual = take_gradients(student)
    return global_norm({n: actual[n].float() - expected[n] for n in expected}) / global_norm(expected)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_bfloat16_strays_no_further_than_1_1_times_the_flat_run(kind: str) -> None:
    ratios = [distance(seed, kind, "tree") / distance(seed, kind, "flat") for seed in range(9)]
    assert sorted(ratios)[4] <= 1.1


PAIR = (np.tile([1, 2], (3, 1)), np.log(np.full((3, 2), 0.4)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divergence": "kl"}, ConfigError, "one of forward_kl, reverse_kl, jsd"),
        ({"beta": 0.5}, ConfigError, "beta applies only to"),
        ({"divergence": "jsd", "beta": 1.0}, ConfigError, "between 0 and 1"),
        ({"top_k": 0}, ConfigError, "at least 1"),
        ({"temperature": 0.0}, InputError, "positive"),
        ({"weight": 0.0}, ConfigError, "positive"),
        ({"teacher": "model"}, InputError, "pair"),
        ({"teacher": TEACHER.config}, InputError, "must be a model"),
        ({"teacher": [PAIR], "top_k": 2}, ConfigError, "top_k applies to a teacher that is a model"),
        ({"teacher": [([[1, 2]], [[0.1]])]}, InputError, "one shape"),
        ({"added_to": dpo([(0, 1)], [[1], [1]])}, ConfigError, "one per pair"),
        ({"added_to": sft(), "shared": "once"}, ConfigError, "sets shared for both"),
        ({"added_to": distill(TEACHER)}, ConfigError, "has one already"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distill(**{"teacher": TEACHER, **options})


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ([PAIR], "every branch"),
        ([PAIR, (PAIR[0][:2], PAIR[1][:2])], "one row per token"),
        ([PAIR, (PAIR[0], PAIR[1] - 0.1)], "the same scores"),
        ([(PAIR[0] * 0 + 1, PAIR[1])] * 2, "occur once"),
        ([(PAIR[0] + 40, PAIR[1])] * 2, "vocabulary of 32"),
        ([(PAIR[0], PAIR[1] * 0)] * 2, "sum to at most 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mismatched_scores_are_refused_before_any_gradient(teacher: Any, message: str) -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(InputError, match=message):
        backward(STUDENT, forest, distill(teacher))
    assert all(weight.grad is None for weight in STUDENT.parameters())


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="share the student's tokenizer, and its head has 40"):
        backward(STUDENT, Forest.from_sequences([[1, 2]]), distill(build_float64(vocab_size=40)))
    with pytest.raises(ConfigError, match="below the vocabulary of 32"):
        backward(STUDENT, Forest.from_sequences([[1, 2]]), distill(TEACHER, top_k=32))
    with pytest.raises(ConfigError, match="only with top_k"):
        score(TEACHER, Forest.from_sequences([[1, 2]]), temperature=0.5)
