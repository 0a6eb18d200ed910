"""Law 2 under torch.compile: compiled layers, decoders and whole models give the same gradients."""

from collections.abc import Callable, Iterator

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

from tests.attention import fake_flash
from tests.forests import SHAPES
from tests.models import assert_gradients_equal, build_float64, take_gradients
from treering.errors import UnsupportedError
from treering.train.gradient.backward import backward
from treering.train.objectives import sft
from treering.tree.forest import Forest

# Two sizes, so that the second runs graphs of another shape than they were traced with.
FORESTS = [Forest.from_sequences(SHAPES[name]) for name in ("long segments", "comb")]
# The tracer cannot read through the test run's type checks, and warns of what it does itself.
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]

BACKEND = "aot_eager"
"""Traces forward and backward as the default does, and then runs them as they are: no C++ compiler needed."""


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


def all_gradients(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    taken = []
    for forest in FORESTS:
        backward(model, forest, sft(normalizer="sum"), max_tokens=None)
        taken.append({name.replace("_orig_mod.", ""): grad for name, grad in take_gradients(model).items()})
    return taken


def assert_compiled_is_exact(model: nn.Module, compiled: Callable[[nn.Module], nn.Module]) -> None:
    expected = all_gradients(model)
    assert num_graphs() == 0
    for actual, wanted in zip(all_gradients(compiled(model)), expected, strict=True):
        assert_gradients_equal(actual, wanted, 1e-10)
    assert num_graphs() > 0, "nothing was compiled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("qwen3", compile_layers),
        ("qwen3", wrap),
        ("gemma2", compile_layers),
        ("gemma2", compile_decoder),
        ("gpt_oss", compile_layers),
    ],
)
def test_compiled_models_are_exact(family: str, compiled: Callable[[nn.Module], nn.Module]) -> None:
    assert_compiled_is_exact(build_float64(family), compiled)


@pytest.mark.slow
def test_a_wrapped_model_is_compiled_once_for_all_steps() -> None:
    model = wrap(build_float64(num_hidden_layers=1))
    backward(model, FORESTS[0], sft())
    after_one = num_graphs()
    for _ in range(2):
        backward(model, FORESTS[0], sft())
    assert num_graphs() == after_one > 0


@pytest.mark.slow
def test_a_compiled_adapter_is_exact() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    assert_compiled_is_exact(get_peft_model(build_float64(), config).double(), wrap)


def test_a_compiled_layer_runs_under_the_stock_forward_again_afterwards() -> None:
    model = compile_layers(build_float64(num_hidden_layers=1))
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    backward(model, FORESTS[0], sft())
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-14, rtol=1e-14)


def adapted(around: Callable[[nn.Module], nn.Module]) -> nn.Module:
    base = around(build_float64())
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, config).double()


@pytest.mark.slow
def test_an_adapter_around_a_compiled_model_is_exact() -> None:
    expected = all_gradients(adapted(lambda model: model))
    assert num_graphs() == 0
    for actual, wanted in zip(all_gradients(adapted(wrap)), expected, strict=True):
        assert_gradients_equal(actual, wanted, 1e-10)
    assert num_graphs() > 0, "nothing was compiled"


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_around_a_compiled_model_are_refused(kind: type) -> None:
    model = get_peft_model(wrap(build_float64("llama")), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedError, match="adds virtual tokens"):
        backward(model, FORESTS[0], sft())


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
        backward(model, FORESTS[0], sft())


def gradients_by(model: nn.Module, backend: str, max_tokens: int | None = None) -> list[dict[str, torch.Tensor]]:
    taken = []
    for forest in FORESTS:
        backward(model, forest, sft(normalizer="sum"), max_tokens=max_tokens, backend=backend)
        taken.append(take_gradients(model))
    return taken


def breaks_at_attention() -> int:
    """How often a graph was left for attention; a model's own breaks, as in gpt-oss's experts, do not count."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    return sum(count for reason, count in reasons.items() if "_attention_outside_graphs" in reason)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_layers_under_flash_leave_no_graph_and_are_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    model = build_float64(family)
    expected = gradients_by(model, "reference")
    for actual, wanted in zip(gradients_by(compile_layers(model), "flash"), expected, strict=True):
        assert_gradients_equal(actual, wanted, 1e-10)
    assert num_graphs() > 0
    assert breaks_at_attention() == 0
    if family != "gpt_oss":
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["segments", "reference", "triton"])
def test_layers_under_other_backends_leave_their_graph_for_attention_only(backend: str) -> None:
    model = compile_layers(build_float64(num_hidden_layers=2))
    gradients_by(model, backend)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks_at_attention() == sum(breaks.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [compile_decoder, wrap])
def test_whole_compiled_models_under_flash_are_exact(
    compiled: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flash.install(monkeypatch)
    model = build_float64(num_hidden_layers=2)
    expected = gradients_by(model, "reference")
    for actual, wanted in zip(gradients_by(compiled(model), "flash"), expected, strict=True):
        assert_gradients_equal({name.replace("_orig_mod.", ""): grad for name, grad in actual.items()}, wanted, 1e-10)
    assert num_graphs() > 0
    assert breaks_at_attention() == 0


@pytest.mark.slow
def test_partitions_of_compiled_layers_under_flash_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch)
    model = build_float64(num_hidden_layers=2)
    expected = gradients_by(model, "reference")
    for actual, wanted in zip(gradients_by(compile_layers(model), "flash", max_tokens=60), expected, strict=True):
        assert_gradients_equal(actual, wanted, 1e-10)
    assert breaks_at_attention() > 0
