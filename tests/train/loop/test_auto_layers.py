"""`layers = "auto"`: chosen by predicted time alone, measured without a trace, and said in one line."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.models import build
from tests.train.loop.runs import tiny_loop, tiny_tasks
from treering.model.layers import Layers, layers_of
from treering.train.loop import auto_layers as module
from treering.train.loop.auto_layers import Trial, auto_layers, choose_layers, measured_layers
from treering.train.loop.batches import make_batch
from treering.train.loop.compute import ComputeOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STOCK = Trial(layers="stock", step_s=0.6)
COMPILED = Trial(layers="compiled", start_s=35.0, step_s=0.4)
LIGER = Trial(layers="liger", start_s=2.0, step_s=0.41)
FORESTS = make_batch(tiny_tasks(3), "tree").forests


@pytest.mark.parametrize(
    ("trials", "num_steps", "chosen"),
    [
        ([STOCK, COMPILED], 174, "stock"),
        ([STOCK, COMPILED], 176, "compiled"),
        ([STOCK, LIGER, COMPILED], 3_299, "liger"),
        ([STOCK, LIGER, COMPILED], 3_301, "compiled"),
        ([STOCK, LIGER, COMPILED], 10, "stock"),
        ([STOCK, replace(STOCK, layers="compiled")], 10, "stock"),
        ([STOCK, replace(LIGER, failure="no device"), replace(COMPILED, failure="no compiler")], 10_000, "stock"),
    ],
)
def test_the_way_that_ends_the_steps_first_is_chosen(trials: list[Trial], num_steps: int, chosen: Layers) -> None:
    assert choose_layers(trials, num_steps).layers == chosen


def no_measurement(*args: object, **options: object) -> None:
    raise AssertionError("nothing may be measured here")


def call_uncompiled(module: nn.Module, **options: object) -> None:
    module._compiled_call_impl = module._call_impl


def decided(device: torch.device = CUDA, *, model: nn.Module, **options: object) -> module.LayersChoice | None:
    return auto_layers(model, FORESTS, ComputeOptions(), **{"num_steps": 1000, "device": device, **options})


def test_a_cpu_has_stock_layers_and_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measured_layers", no_measurement)
    assert decided(CPU, model=build(num_hidden_layers=1)) is None
    assert tiny_loop(layers="auto", num_steps=3).step().update.notes == ()


@pytest.mark.parametrize(
    "options", [{"num_ranks": 2}, {"num_steps": None}, {"is_deterministic": True}, {"is_compiled": True}]
)
def test_what_cannot_be_measured_stays_as_it_is(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measured_layers", no_measurement)
    is_compiled, model = bool(options.pop("is_compiled", False)), build(num_hidden_layers=1)
    if is_compiled:
        call_uncompiled(model.model.layers[0])
    torch.use_deterministic_algorithms(bool(options.pop("is_deterministic", False)))
    try:
        choice = decided(model=model, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert choice is not None
    assert choice.layers == ("compiled" if is_compiled else "stock")


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", call_uncompiled)
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    model = build(num_hidden_layers=1)
    for weight in list(model.parameters())[::2]:
        weight.grad = torch.ones_like(weight)
    grads = [weight.grad for weight in model.parameters()]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    random = torch.get_rng_state()
    choice = measured_layers(model, FORESTS, ComputeOptions(), 10**9)
    assert choice.reason.startswith("auto: 1000000000 steps take stock ")
    assert ", compiled " in choice.reason
    assert "fails" not in choice.reason
    assert all(weight.grad is grad for weight, grad in zip(model.parameters(), grads, strict=True))
    assert all(bool((grad == 1).all()) for grad in grads if grad is not None)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert layers_of(model) == "stock"


def test_a_short_run_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "set_layers", no_measurement)
    choice = measured_layers(build(num_hidden_layers=1), FORESTS, ComputeOptions(), 1)
    assert choice.layers == "stock"
    assert "too few to compile for" in choice.reason


def with_wrong_norm(model: nn.Module, layers: Layers) -> Callable[[], None]:
    handle = model.model.layers[0].register_forward_hook(lambda layer, args, output: -output)
    return handle.remove


def without_compiler(model: nn.Module, layers: Layers) -> Callable[[], None]:
    raise RuntimeError("no C++ compiler\nand many lines more")


@pytest.mark.parametrize(
    ("set_layers", "failure"),
    [
        (with_wrong_norm, "compiled fails (its loss is "),
        (without_compiler, "compiled fails (RuntimeError: no C++ compiler)"),
    ],
)
def test_a_way_that_fails_or_computes_something_else_is_left_out_and_named(
    set_layers: Callable[..., Callable[[], None]], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "set_layers", set_layers)
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    model = build(num_hidden_layers=1)
    choice = measured_layers(model, FORESTS, ComputeOptions(), 10**9)
    assert choice.layers == "stock"
    assert failure in choice.reason
    assert not model.model.layers[0]._forward_hooks


def test_the_first_update_of_a_loop_runs_the_chosen_layers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, applied = [], []

    def choose(model: nn.Module, forests: object, compute: object, **options: object) -> module.LayersChoice:
        asked.append(options["num_steps"])
        return module.LayersChoice(layers="compiled", reason="auto: it is faster")

    monkeypatch.setattr("treering.train.loop.update.auto_layers", choose)
    monkeypatch.setattr("treering.train.loop.update.set_layers", lambda model, layers: applied.append(layers))
    loop = tiny_loop(build(num_hidden_layers=1), layers="auto", num_steps=7)
    assert [loop.step().update.notes for _ in range(2)] == [("layers: compiled (auto: it is faster)",), ()]
    assert (asked, applied) == ([7], ["compiled"])
