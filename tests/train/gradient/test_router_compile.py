"""Router losses of compiled models: router outputs are recorded, or an error says why they cannot be."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.forests import SHAPES
from tests.model.test_compile import BACKEND, compile_layers, wrap
from tests.models import assert_gradients_equal, build_float64, take_gradients
from tests.train.gradient.test_backward import batch_of, forests_of
from treering.config.steps import RouterLosses
from treering.errors import StateError
from treering.objectives import sft
from treering.train.step import backward

# The tracer cannot read through the test run's type checks, and emits its own warnings.
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]

BATCH = batch_of([SHAPES["bushy"][:3], SHAPES["duplicates"]])
LOSSES = RouterLosses(balance=0.7, z=0.2)


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_experts(model: nn.Module) -> nn.Module:
    parts: Any = model
    for layer in parts.model.layers:
        layer.mlp.compile(backend=BACKEND)
    return model


def step(model: nn.Module, max_tokens: int | None, losses: RouterLosses | None = LOSSES) -> dict[str, Tensor]:
    backward(model, forests_of(BATCH), sft(BATCH.masks), max_tokens, router_losses=losses)
    return {name.removeprefix("_orig_mod."): grad for name, grad in take_gradients(model).items()}


@pytest.mark.parametrize("compiled", [compile_experts, wrap])
def test_compiled_routers_are_heard(compiled: Callable[[nn.Module], nn.Module]) -> None:
    alone, model = (build_float64("mixtral", num_hidden_layers=1) for _ in range(2))
    model = compiled(model)
    # Includes a pass without gradients, partitions, and unrecorded forwards that measure memory.
    assert_gradients_equal(step(model, 40), step(alone, 40), 1e-10)


def test_layers_that_were_traced_before_are_noticed() -> None:
    model = compile_layers(build_float64("mixtral", num_hidden_layers=1))
    step(model, None, losses=None)
    with pytest.raises(StateError, match=r"call torch\.compiler\.reset\(\) once"):
        step(model, None)
    torch.compiler.reset()
    step(model, None)
