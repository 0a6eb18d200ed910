"""Law 2 with compiled layers and with Liger's kernels, whoever installed them."""

import gc
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental import _config as shape_config

import treering
from tests import liger
from tests.attention import fake_flash
from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.errors import MissingExtraError, UnsupportedError
from treering.families import FAMILIES, Family
from treering.model.forward import FILLER, hidden_states
from treering.model.layers import choose_layers, enable_gradient_checkpointing, layers_of, set_layers
from treering.model.tree_model import TreeModel
from treering.objectives import sft
from treering.ranks.group import RankGroup
from treering.train.loop import compute
from treering.train.loop.update import Updater
from treering.train.memory import PROBE_TOKENS, bytes_per_token
from treering.train.step import backward
from treering.tree.forest import Forest

SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7, 8]]
FOREST = Forest.from_sequences(SEQUENCES)
STOCK = 1e-5
"""Tolerance of float32 kernels that sum in another order."""

# The tracer cannot read through the test run's type checks, and emits its own warnings.
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def num_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Count compiled graphs; they run uncompiled after tracing, so that no C++ compiler is needed."""
    stock = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: stock(self, backend="aot_eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()


def gradients(model: nn.Module, forest: Forest = FOREST, **options: object) -> dict[str, torch.Tensor]:
    backward(model, forest, sft(normalizer="sum"), **options)
    return take_gradients(model)


def flat_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Compute the gradients by the model's own forward, one sequence at a time."""
    for sequence in SEQUENCES:
        (-flat_logprobs(model, sequence)[0].sum()).backward()
    return take_gradients(model)


def random_forest(rng: np.random.Generator) -> Forest:
    shared = rng.integers(0, 32, rng.integers(3, 40)).tolist()
    return Forest.from_sequences(
        [[*shared, *rng.integers(0, 32, rng.integers(2, 20)).tolist()] for _ in range(rng.integers(1, 5))]
    )


@pytest.mark.slow
def test_forests_of_twenty_shapes_run_one_graph(num_graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install(monkeypatch, (8, 6))
    monkeypatch.setattr(shape_config, "use_duck_shape", True)
    model = build_float64(num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8, head_dim=8)
    names = list(model.state_dict())
    rng = np.random.default_rng(0)
    forests = [FILLER, *(random_forest(rng) for _ in range(19))]
    expected = gradients(model, forests[-1], backend="flash")
    undo = set_layers(model, "compiled")
    with treering.tree_attention(model, "flash"):
        bytes_per_token(TreeModel.of(model))
        # FILLER has no trained edges, and `backward` skips it unless other ranks wait.
        hidden_states(TreeModel.of(model), FILLER)
    for forest in forests:
        actual = gradients(model, forest, backend="flash")
    assert len({forest.num_tokens for forest in forests}) > 12
    assert num_graphs() == 1
    assert_gradients_equal(actual, expected, 1e-10)
    assert list(model.state_dict()) == names
    assert layers_of(model) == "compiled"
    undo()
    assert layers_of(model) == "stock"


def test_no_probe_is_as_long_as_a_model_has_heads_or_sizes() -> None:
    # Model sizes are even or 1 to 15. If other code compiles, equal sizes would share one symbol.
    assert all(length % 2 == 1 and length > 15 for length in PROBE_TOKENS)


@pytest.mark.slow
def test_checkpointed_layers_are_compiled_and_exact(num_graphs: Callable[[], int]) -> None:
    model = build_float64(num_hidden_layers=1)
    expected = gradients(model)
    enable_gradient_checkpointing(model, "reentrant")
    set_layers(model, "compiled")
    assert_gradients_equal(gradients(model, backend="segments"), expected, 1e-10)
    assert num_graphs() > 0
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "glm4"])
def test_ligers_kernels_are_exact_and_keep_names_weights_and_other_models(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    liger.interpret(monkeypatch)
    model = build(family, num_hidden_layers=1)
    code, names = sys.modules[type(model).__module__], [name for name, _ in model.named_modules()]
    before, weights = dict(vars(code)), {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = flat_gradients(model)
    undo = set_layers(model, "liger")
    assert_gradients_equal(gradients(model), expected, STOCK)
    assert layers_of(model) == "liger"
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert {name for name, value in vars(code).items() if value is not before[name]} <= {"apply_rotary_pos_emb"}
    undo()
    assert vars(code) == before
    assert layers_of(model) == "stock"
    assert_gradients_equal(gradients(model), expected, STOCK)


def test_a_family_that_liger_does_not_know_is_refused_and_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    liger.interpret(monkeypatch)
    monkeypatch.setitem(FAMILIES, "own_qwen3", Family(model_type="own_qwen3", liger_activation="silu"))
    model = build(num_hidden_layers=1)
    model.config.model_type = "own_qwen3"
    with pytest.raises(UnsupportedError, match="no kernels for 'own_qwen3'"):
        set_layers(model, "liger")
    assert layers_of(model) == "stock"


@pytest.mark.slow
def test_partitions_by_ligers_kernels_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    liger.interpret(monkeypatch)
    model = build(num_hidden_layers=1)
    expected = flat_gradients(model)
    undo = set_layers(model, "liger")
    try:
        for free in (float("inf"), 0.0):
            monkeypatch.setattr("treering.train.memory.free_memory", lambda device, free=free: free)
            assert_gradients_equal(gradients(model, max_tokens=4), expected, STOCK)
    finally:
        undo()


@pytest.mark.slow
def test_ligers_kernels_are_exact_in_layers_that_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    liger.interpret(monkeypatch)
    model = build(num_hidden_layers=1)
    expected = flat_gradients(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compute.shard_model(model, "none")
        undo = set_layers(model, "liger")
        assert layers_of(model) == "liger"
        actual = gradients(model)
        assert_gradients_equal({name: shard.full_tensor() for name, shard in actual.items()}, expected, STOCK)
        undo()
    finally:
        del model
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_model_with_ligers_kernels_and_its_fused_loss_trains_the_same_when_it_is_patched(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    liger.interpret(monkeypatch)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = build(num_hidden_layers=1)
    code = sys.modules[type(model).__module__]
    for name, value in vars(code).copy().items():
        monkeypatch.setattr(code, name, value)
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 6]])
    model(input_ids=ids, labels=ids).loss.backward()
    expected = take_gradients(model)
    if order == "before":
        _apply_liger_kernel_to_instance(model)
    patched = treering.patch(model)
    if order == "after":
        _apply_liger_kernel_to_instance(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert_gradients_equal(take_gradients(model), expected, STOCK)
    assert patched.take_counts().num_tokens == 5
    patched.undo()
    model(input_ids=ids, labels=ids).loss.backward()
    assert patched.take_counts().num_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_model_wrapped_by_torch_compile_trains_the_same_when_it_is_patched(
    order: str, num_graphs: Callable[[], int]
) -> None:
    model, ids = build_float64(num_hidden_layers=1), torch.tensor([[1, 2, 3, 4], [1, 2, 3, 6]])
    model(input_ids=ids, labels=ids).loss.backward()
    expected = take_gradients(model)
    patched = treering.patch(model) if order == "before" else None
    wrapped = torch.compile(model, backend="aot_eager")
    patched = patched or treering.patch(wrapped)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert_gradients_equal(take_gradients(model), expected, 1e-10)
    assert patched.take_counts().num_tokens == 5
    # If the model was patched first, torch.compile does not see the decoder.
    assert (num_graphs() > 0) == (order == "after")


def test_liger_is_refused_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingExtraError, match=r'layers = "liger" needs liger_kernel: pip install .liger-kernel>='):
        set_layers(build(), "liger")


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("mixtral", {}, "but not for model type 'mixtral'"),
        ("qwen3", {"hidden_act": "gelu"}, "compute silu .* this model has the activation 'gelu'"),
        ("qwen3", {}, "run on CUDA, and the model is on cpu"),
    ],
)
def test_liger_is_refused_where_its_kernels_are_not_exact(
    family: str, overrides: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("treering.extras.find_spec", lambda package: package)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    model = build(family, **overrides)
    with pytest.raises(UnsupportedError, match=reason):
        set_layers(model, "liger")
    assert layers_of(model) == "stock"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("products", ["grouped_mm", "batched_mm"])
def test_the_products_that_a_user_sets_for_experts_are_kept_and_exact(products: str, family: str) -> None:
    model = build(family)
    expected = flat_gradients(model)
    model.set_experts_implementation(products)
    assert_gradients_equal(gradients(model), expected, STOCK)
    assert_gradients_equal(gradients(model, max_tokens=4), expected, STOCK)
    assert model.config._experts_implementation == products


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("family", "is_exact", "num_steps", "num_ranks", "device", "chosen"),
    [
        ("qwen3", True, 5, 1, CUDA, "liger"),
        ("qwen3", True, None, 8, CUDA, "liger"),
        ("qwen3", True, 1000, 1, torch.device("cpu"), "stock"),
        ("qwen3", False, 199, 1, CUDA, "stock"),
        ("qwen3", False, 200, 1, CUDA, "compiled"),
        ("qwen3", False, 200, 2, CUDA, "stock"),
        ("qwen3", False, None, 1, CUDA, "stock"),
        ("mixtral", True, 200, 1, CUDA, "compiled"),
    ],
)
def test_auto_is_liger_where_it_is_exact_and_else_compiled_for_long_runs_on_one_rank(
    family: str,
    is_exact: bool,
    num_steps: int | None,
    num_ranks: int,
    device: torch.device,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("treering.extras.find_spec", lambda package: package if is_exact else None)
    # Run Liger's kernels in the interpreter, so that the model may stay on the CPU.
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    model = build(family, num_hidden_layers=1)
    assert choose_layers(model, num_steps, num_ranks=num_ranks, device=device)[0] == chosen


def test_auto_leaves_layers_that_somebody_has_compiled() -> None:
    model = build(num_hidden_layers=1)
    model.model.layers[0]._compiled_call_impl = model.model.layers[0]._call_impl
    assert choose_layers(model, 5, num_ranks=1, device=CUDA) == ("compiled", "as the model came")


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_loop_applies_the_layers_that_auto_chooses_before_its_first_update(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, applied = [], []

    def choose(model: nn.Module, num_steps: int | None, **options: object) -> tuple[str, str]:
        asked.append((num_steps, options["num_ranks"]))
        return "compiled", "it is a long run"

    monkeypatch.setattr(compute, "choose_layers", choose)
    monkeypatch.setattr(compute, "set_layers", lambda model, layers: applied.append(layers))
    optim = OptimOptions(learning_rate=1e-2, num_steps=7)
    Updater(build(num_hidden_layers=1), optim, SftOptions(layers="auto"), rank_group=RankGroup(size=num_ranks))
    assert (asked, applied) == ([(7, num_ranks)], ["compiled"])
