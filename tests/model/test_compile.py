"""Law 2 under torch.compile: compiled layers, decoders and whole models give the same gradients."""

from collections.abc import Callable, Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.attention import fake_flash
from tests.forests import comb
from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import UnsupportedError
from treering.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest

SMALL = Forest.from_sequences([[5] * 12 + [6] * 9, [5] * 12 + [7] * 8, [5] * 12 + [7] * 8 + [1] * 7, [1, 2]])
# The second size runs graphs traced for another shape, which costs as much again.
TWO_SIZES = [SMALL, Forest.from_sequences(comb(15))]
# The tracer cannot read through the test run's type checks, and emits its own warnings.
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]

BACKEND = "aot_eager"
"""Traces forward and backward like the default, then runs them uncompiled: no C++ compiler needed."""


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compile_layers(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def compile_decoder(model: nn.Module) -> nn.Module:
    model.model.compile(backend=BACKEND)
    return model


def wrap(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=BACKEND)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def gradients(
    model: nn.Module, forest: Forest = SMALL, backend: str = "auto", max_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    backward(model, forest, sft(normalizer="sum"), max_tokens=max_tokens, backend=backend)
    return {name.replace("_orig_mod.", ""): grad for name, grad in take_gradients(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "compiled"), [("gemma2", compile_decoder), ("qwen3", wrap)], ids=["decoder", "whole model"]
)
def test_a_compiled_model_is_exact_and_compiled_once_for_all_steps(
    family: str, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    model = build_float64(family, num_hidden_layers=1)
    expected = gradients(model)
    assert num_graphs() == 0
    model = compiled(model)
    assert_gradients_equal(gradients(model), expected, 1e-10)
    after_one = num_graphs()
    assert after_one > 0, "nothing was compiled"
    gradients(model)
    assert num_graphs() == after_one


def test_a_compiled_layer_runs_under_the_stock_forward_again_afterwards() -> None:
    model = compile_layers(build_float64(num_hidden_layers=1))
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    backward(model, SMALL, sft())
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-14, rtol=1e-14)


def adapted(around: Callable[[nn.Module], nn.Module]) -> nn.Module:
    base = around(build_float64(num_hidden_layers=1))
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, config).double()


@pytest.mark.slow
def test_an_adapter_around_a_compiled_model_is_exact() -> None:
    expected = gradients(adapted(lambda model: model))
    assert num_graphs() == 0
    assert_gradients_equal(gradients(adapted(wrap)), expected, 1e-10)
    assert num_graphs() > 0, "nothing was compiled"


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def in_place_inside_an_adapter(model: nn.Module) -> nn.Module:
    return get_peft_model(in_place(model), LoraConfig(r=2, target_modules=["q_proj"]))


def in_place_between(model: nn.Module) -> nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    in_place(adapted.base_model)
    return adapted


@pytest.mark.parametrize("compiled", [in_place, in_place_inside_an_adapter, in_place_between])
def test_a_model_compiled_in_place_is_refused(compiled: Callable[[nn.Module], nn.Module]) -> None:
    model = compiled(build_float64())
    with pytest.raises(UnsupportedError, match=r"\.compile\(\).*layer\.compile\(\)"):
        backward(model, SMALL, sft())


def breaks_at_attention() -> int:
    """Count the graph breaks at attention; a model's own breaks, as in gpt-oss's experts, do not count."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    return sum(count for reason, count in reasons.items() if "_attention_outside_graphs" in reason)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_layers_under_flash_leave_no_graph_and_are_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    model = build_float64(family)
    forests = TWO_SIZES if family == "qwen3" else [SMALL]
    expected = [gradients(model, forest, "reference") for forest in forests]
    compile_layers(model)
    for forest, wanted in zip(forests, expected, strict=True):
        assert_gradients_equal(gradients(model, forest, "flash"), wanted, 1e-10)
    assert num_graphs() > 0
    assert breaks_at_attention() == 0
    if family != "gpt_oss":
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_layers_under_segments_leave_their_graph_for_attention_only_and_are_exact() -> None:
    model = build_float64(num_hidden_layers=1)
    expected = gradients(model, backend="reference")
    assert_gradients_equal(gradients(compile_layers(model), backend="segments"), expected, 1e-10)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks_at_attention() == sum(breaks.values()) > 0


@pytest.mark.slow
def test_partitions_of_compiled_layers_under_flash_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    model = build_float64(num_hidden_layers=1)
    expected = gradients(model, backend="reference")
    assert_gradients_equal(gradients(compile_layers(model), backend="flash", max_tokens=20), expected, 1e-10)
    assert breaks_at_attention() > 0
