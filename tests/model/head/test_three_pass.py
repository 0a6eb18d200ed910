"""The head's kernels, in triton's interpreter, equal a float64 softmax in scores and every input's gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treering.model import edges
from treering.model.logits import BufferedHead, LinearRows, chunks
from treering.model.three_pass import (
    ThreePassLoss,
    ThreePassScores,
    backward_of,
    begin_step,
    has_kernels,
    rows_at_once,
)

pytest.importorskip("triton")
kernels = pytest.importorskip("treering.model.head_kernels")
pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="the kernels are compiled here")

NUM_ROWS, SIZE = 7, 12
# More than a block of the interpreter, and not a multiple of it.
VOCAB = kernels.BLOCK + 45
ROW_OF = np.array([0, 0, 0, 1, 3, 3, 4, 6], np.int64)
# Row 3 scores one token twice.
TARGETS = torch.tensor([5, VOCAB - 1, 0, 7, 9, 9, 3, 2])


def inputs(*, with_bias: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(NUM_ROWS, SIZE, generator=generator)
    weight = torch.randn(VOCAB, SIZE, generator=generator)
    bias = torch.randn(VOCAB, generator=generator)
    # A certain token: two parts of its gradient nearly cancel.
    weight[3] = rows[4] * 4
    # The model hides most of a block of tokens.
    bias[: kernels.BLOCK - 40] += torch.where(torch.arange(kernels.BLOCK - 40) > 20, -float("inf"), 0.0)
    return [tensor.to(dtype).requires_grad_() for tensor in ([rows, weight, bias] if with_bias else [rows, weight])]


def spelled_out(tensors: list[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    rows, weight, *bias = tensors
    logits = rows @ weight.T + (bias[0] if bias else 0.0)
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)
    return logprobs[torch.from_numpy(ROW_OF), TARGETS], entropy[torch.from_numpy(ROW_OF)]


def scores(tensors: list[Tensor], kind: Any, *, temperature: float, max_rows: int, entropy_of: str) -> Any:
    pieces = chunks(NUM_ROWS, ROW_OF, max_rows)
    weights = [*tensors[:2], tensors[2] if len(tensors) > 2 else None]
    if kind is LinearRows:
        of_logits = edges._TargetScores(TARGETS, torch.from_numpy(ROW_OF), entropy_of)
        return LinearRows.apply(*weights, pieces, temperature, of_logits)
    return kind.apply(*weights, TARGETS, torch.from_numpy(ROW_OF), pieces, temperature, entropy_of)


@pytest.mark.parametrize(("max_rows", "temperature", "with_bias"), [(1, 1.0, True), (3, 0.6, False), (100, 0.6, True)])
@pytest.mark.parametrize("upstream", ["logprobs", "entropy", "both"])
def test_scores_and_gradients_are_those_of_a_softmax(
    max_rows: int, temperature: float, with_bias: bool, upstream: str
) -> None:
    tensors = inputs(with_bias=with_bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = spelled_out(exact, temperature)
    got = scores(tensors, ThreePassScores, temperature=temperature, max_rows=max_rows, entropy_of="all")
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    factors = torch.linspace(-1.0, 2.0, ROW_OF.size)
    chosen = {"logprobs": [0], "entropy": [1], "both": [0, 1]}[upstream]

    def gradients(side: Any, leaves: list[Tensor]) -> list[Tensor]:
        loss = torch.stack([(factors.to(side[i]) * side[i]).sum() for i in chosen]).sum()
        return [gradient.double().nan_to_num() for gradient in torch.autograd.grad(loss, leaves)]

    # Allow the error of the float32 head of other devices, which also computes weights from logits and log-sum-exps.
    plain = inputs(with_bias=with_bias)
    others = scores(plain, LinearRows, temperature=temperature, max_rows=max_rows, entropy_of="all")
    sides = (got, tensors), (others, plain), (wanted, exact)
    for mine, theirs, right in zip(*(gradients(*side) for side in sides), strict=True):
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + 1e-6 * right.norm()


def test_without_entropies_they_are_zero_and_log_probs_the_same() -> None:
    options = {"temperature": 0.6, "max_rows": 3}
    with_them, without = (scores(inputs(), ThreePassScores, entropy_of=of, **options) for of in ("all", "none"))
    assert torch.equal(with_them[0], without[0])
    assert not without[1].any()


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_a_frozen_input_takes_no_gradient_and_changes_no_other(needed: int) -> None:
    whole, alone = inputs(), inputs()
    for i, tensor in enumerate(alone):
        tensor.requires_grad_(i == needed)
    for tensors in (whole, alone):
        scores(tensors, ThreePassScores, temperature=1.0, max_rows=3, entropy_of="none")[0].sum().backward()
    assert torch.equal(alone[needed].grad, whole[needed].grad)
    assert [tensor.grad is None for tensor in alone] == [i != needed for i in range(3)]


@pytest.mark.parametrize("max_rows", [3, 100])
def test_in_bfloat16_gradients_are_no_further_from_float32_than_those_of_widened_logits(max_rows: int) -> None:
    def gradients(kind: Any, dtype: torch.dtype) -> list[Tensor]:
        tensors = inputs(with_bias=False, dtype=dtype)
        exact = [tensor.detach().to(torch.bfloat16).to(dtype).requires_grad_() for tensor in tensors]
        logprobs, entropy = scores(exact, kind, temperature=0.8, max_rows=max_rows, entropy_of="all")
        return list(torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), exact))

    wanted = gradients(LinearRows, torch.float32)
    for mine, today, right in zip(
        gradients(ThreePassScores, torch.bfloat16), gradients(LinearRows, torch.bfloat16), wanted, strict=True
    ):
        assert (mine.float() - right).norm() <= 1.1 * (today.float() - right).norm()


@pytest.mark.parametrize("max_rows", [3, 100])
def test_a_loss_and_its_gradients_are_those_of_a_softmax_and_logits_are_computed_once(
    max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = torch.linspace(-1.0, 2.0, ROW_OF.size)

    def loss_of(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        # The gradient depends on the log-probabilities and entropies, so it is unknown before them.
        return (factors[at].to(logprobs.dtype) * (0.1 * logprobs).exp() + 0.3 * entropy.square()).sum()

    tensors = inputs()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = loss_of(slice(0, ROW_OF.size), *spelled_out(exact, 0.6))
    products = []
    compute = BufferedHead.product
    monkeypatch.setattr(
        BufferedHead, "product", lambda head, rows: products.append(rows.shape[0]) or compute(head, rows)
    )
    pieces = chunks(NUM_ROWS, ROW_OF, max_rows)
    got = ThreePassLoss.apply(*tensors, TARGETS, torch.from_numpy(ROW_OF), pieces, 0.6, "all", loss_of)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(2.5 * got, tensors, retain_graph=True)
    for again, first in zip(torch.autograd.grad(2.5 * got, tensors), mine, strict=True):
        assert torch.equal(again, first)
    for gradient, right in zip(mine, torch.autograd.grad(2.5 * wanted, exact), strict=True):
        assert (gradient.double() - right.nan_to_num()).norm() <= 1e-5 * right.nan_to_num().norm()
    assert sum(products) == NUM_ROWS


@pytest.mark.parametrize("max_rows", [3, 100])
def test_a_second_backward_of_a_graph_gives_the_gradients_of_the_first(max_rows: int) -> None:
    tensors = inputs()
    logprobs, entropy = scores(tensors, ThreePassScores, temperature=0.6, max_rows=max_rows, entropy_of="all")
    loss = logprobs.sum() + 0.3 * entropy.sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    for mine, right in zip(torch.autograd.grad(loss, tensors), first, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which the interpreter runs on, warns of each NaN
@pytest.mark.parametrize("upstream", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_a_distribution_has_no_number_and_changes_no_other(upstream: str, dtype: torch.dtype) -> None:
    inf, last, temperature = float("inf"), VOCAB - 1, 1.7
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, (token, value) in enumerate([(0, inf), (last, inf), (3, torch.nan), (last, torch.nan)]):
        logits[row, token] = value
    logits[4] = -inf
    # A block hidden except for one NaN, a row whose scored token is hidden, and an ordinary row.
    logits[5, : kernels.BLOCK] = -inf
    logits[5, 2] = torch.nan
    logits[6, 9] = -inf
    rows, targets = torch.arange(8), torch.tensor([1, 1, 1, 1, 1, 1, 9, 1])
    factors = torch.linspace(0.5, 2.0, 8)
    grads = [factors if upstream in (name, "both") else None for name in ("logprobs", "entropy")]

    exact = logits.double().requires_grad_()
    logprobs = (exact / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -inf, 0.0)).sum(-1)
    wanted = [logprobs[rows, targets], entropy]
    chosen = [i for i in range(2) if grads[i] is not None]
    gradient = torch.autograd.grad([wanted[i] for i in chosen], exact, [factors.double()] * len(chosen))[0]
    assert wanted[0][:6].isnan().all()
    assert gradient[:6].isnan().all()

    lse, own_entropy = kernels.row_statistics(logits, scale=1 / temperature, with_entropy=True)
    own_logprobs = logits[rows, targets].float() / temperature - lse
    kernels.write_gradient(logits, lse, own_entropy, targets, rows, own_logprobs, *grads, scale=1 / temperature)
    assert lse[:6].isnan().all()
    torch.testing.assert_close(own_logprobs.double(), wanted[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(own_entropy.double(), wanted[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    rounding = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(logits.double(), gradient, rtol=rounding, atol=1e-5, equal_nan=True)


def test_chunks_have_stable_sizes_that_never_grow_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)

    def rows_with(free_bytes: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
        return rows_at_once(torch.device("cuda"), torch.bfloat16, torch.Size([151_936, 2048]))

    # Each logit takes 2 bytes of an eighth of the memory left after the float32 sum and its bfloat16 copy.
    def free_for(rows: int) -> int:
        return rows * 151_936 * 2 * 8 + 151_936 * 2048 * 6

    begin_step()
    assert [rows_with(free_for(rows)) for rows in (9000, 8200, 8191, 20_000, 3000)] == [8192, 8192, 4096, 4096, 2048]
    begin_step()
    assert rows_with(free_for(8192)) == 8192
    assert rows_with(0) == 1


@pytest.mark.parametrize(("num_rows", "held"), [(1, 1), (5, 8), (8, 8), (1025, 2048)])
def test_on_cuda_few_sizes_of_buffers_hold_the_logits_of_any_rows(num_rows: int, held: int) -> None:
    class OnCuda(Tensor):
        is_cuda = True

    weight = torch.zeros(VOCAB, SIZE).as_subclass(OnCuda)
    logits = BufferedHead(weight, None, chunks(num_rows, ROW_OF, num_rows)).product(torch.zeros(num_rows, SIZE))
    assert logits.shape == (num_rows, VOCAB)
    assert logits.untyped_storage().nbytes() == held * VOCAB * 4


def test_a_gradient_of_1_is_not_multiplied_and_any_other_is() -> None:
    tensors = inputs(with_bias=False)
    pieces = chunks(NUM_ROWS, ROW_OF, 3)

    def loss() -> Tensor:
        options = pieces, 0.6, "none", lambda at, logprobs, entropy: logprobs.sum()
        return ThreePassLoss.apply(*tensors, None, TARGETS, torch.from_numpy(ROW_OF), *options)

    def weight_gradient(total: Tensor) -> tuple[Tensor, bool]:
        tensors[1].grad = None
        multiplied: list[torch.Size] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.mul.Tensor:
                    multiplied.append(args[0].shape)
                return func(*args, **(kwargs or {}))

        with Watch():
            backward_of(total)
        assert tensors[1].grad is not None
        return tensors[1].grad.clone(), tensors[1].shape in multiplied

    wanted = torch.autograd.grad(loss(), tensors[1])[0]
    one, is_multiplied = weight_gradient(loss() + 0.0 * tensors[0][0, 0])
    assert torch.equal(one, wanted)
    assert not is_multiplied
    for total, factor in ((2.5 * loss(), 2.5), (loss() + loss(), 2.0), (-loss(), -1.0)):
        torch.testing.assert_close(weight_gradient(total)[0], factor * wanted)


def test_in_deterministic_mode_the_rows_of_a_chunk_do_not_depend_on_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)

    def rows_with(free_bytes: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
        return rows_at_once(torch.device("cuda"), torch.bfloat16, torch.Size([1000, 1]))

    begin_step()
    assert rows_with(17 * 10**6) == 1024
    torch.use_deterministic_algorithms(True)
    try:
        assert rows_with(16 * 10**6) == rows_with(160 * 10**6) == 536_870
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_keeps_its_own_way() -> None:
    assert not has_kernels(torch.device("cpu"))
