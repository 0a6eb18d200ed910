"""A backend that rounds too much, leaks, or has a wrong gradient is refused with figures before it is used."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from treering.attention import AttentionShape, ScoreOptions, TreeLayout, attend, dispatch
from treering.attention.dispatch import OFF_SWITCH, check_backend, reference_attention, verify
from treering.errors import UnsupportedError
from treering.tree.forest import Forest

SHAPE = AttentionShape(4, 2, 16, torch.float32, torch.device("cpu"))
Attention = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    check_backend.cache_clear()
    yield
    check_backend.cache_clear()


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Attention], None]:
    """Return a function that replaces the implementation of every backend except the reference."""

    def replace(attention: Attention) -> None:
        monkeypatch.setattr(
            dispatch, "implementation", lambda backend: reference_attention if backend == "reference" else attention
        )

    return replace


def one_key_leaks(query: Tensor, key: Tensor, value: Tensor, *, layout: TreeLayout, **options: Any) -> Tensor:
    """Let the first token of a branch see the last token of the branch before it."""
    lengths = SHAPE.lengths
    first, second = lengths[0] + lengths[1] - 1, lengths[0] + lengths[1]
    out = reference_attention(query, key, value, layout=layout, **options)
    seen = out.clone()
    seen[:, :, second] += 1e-3 * value[:, :, first].repeat_interleave(query.shape[1] // key.shape[1], 1)
    return seen


class _GradientOfASibling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        start = SHAPE.lengths[0]
        wrong = grad.clone()
        wrong[:, :, start] += 1e-4 * grad[:, :, start + SHAPE.lengths[1]]
        return wrong


def one_gradient_leaks(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute the right forward, but give a branch's first token a little of its sibling's gradient."""
    return reference_attention(query, key, _GradientOfASibling.apply(value), **options)


def half_precision(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Round the inputs to 10 bits, as tf32 does."""
    rounded = [tensor.half().to(tensor.dtype) for tensor in (query, key, value)]
    return reference_attention(*rounded, **options)


def not_a_number(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return reference_attention(query, key, value, **options) * float("nan")


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, {}) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        (torch.float32, {"has_window": True, "softcap": 5.0, "has_sinks": True}),
    ],
)
@pytest.mark.parametrize("backend", ["segments", "flex"])
def test_backends_of_a_cpu_pass(backend: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    found = check_backend(backend, SHAPE._replace(dtype=dtype, **options))
    assert found.has_passed
    assert found.has_gradients == (backend != "flex")


@pytest.mark.parametrize(
    ("attention", "dtype", "fault"),
    [
        (one_key_leaks, torch.float32, "lets tokens see another branch"),
        (one_key_leaks, torch.bfloat16, "lets tokens see another branch"),
        (one_gradient_leaks, torch.float64, "gives a branch the gradient of another one"),
        (one_gradient_leaks, torch.bfloat16, "gives a branch the gradient of another one"),
    ],
)
def test_leaks_from_another_branch_are_found_below_rounding(
    attention: Attention, dtype: torch.dtype, fault: str, run_as: Callable[..., None]
) -> None:
    run_as(attention)
    with pytest.raises(UnsupportedError, match=f"segments backend {fault}"):
        verify("segments", SHAPE._replace(dtype=dtype))


@pytest.mark.parametrize("attention", [half_precision, not_a_number])
def test_errors_beyond_rounding_are_refused_with_the_figures(attention: Attention, run_as: Callable[..., None]) -> None:
    run_as(attention)
    with pytest.raises(
        UnsupportedError, match=r"off by .* at most 1\.0e-05 is rounding \(4 heads over 2 of size 16, torch\.float32"
    ):
        verify("segments", SHAPE)


def test_attend_refuses_before_it_computes(run_as: Callable[..., None]) -> None:
    run_as(half_precision)
    layout = TreeLayout(Forest.from_sequences([[1, 2, 3]]), torch.device("cpu"))
    inputs = [torch.zeros(1, heads, 3, 16) for heads in (4, 2, 2)]
    with pytest.raises(UnsupportedError, match="segments backend is off"):
        attend(*inputs, layout=layout, options=ScoreOptions(scale=0.25))
    attend(*inputs, layout=layout, options=ScoreOptions(scale=0.25), backend="reference")


def test_the_off_switch_leaves_the_check_out(run_as: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(half_precision)
    monkeypatch.setenv(OFF_SWITCH, "0")
    verify("segments", SHAPE)


def test_a_shape_is_checked_once(run_as: Callable[..., None]) -> None:
    calls = []

    def counted(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return reference_attention(*tensors, **options)

    run_as(counted)
    verify("segments", SHAPE)
    num_calls = len(calls)
    verify("segments", SHAPE)
    assert num_calls == len(calls) > 0
    verify("segments", SHAPE._replace(num_heads=2))
    assert len(calls) == 2 * num_calls


def test_a_check_changes_no_random_state_and_works_in_inference_mode() -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert check_backend("segments", SHAPE).has_gradients
    assert torch.equal(torch.get_rng_state(), before)
