"""Law 2 on a device, in bfloat16: the tree step's gradient is as near to float32's as that of flat sequences.

Compares weight by weight on the device, because moving a large model's gradients would take minutes.
"""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.budget import Cell
from benchmarks.gpu.data import Workload
from benchmarks.gpu.model.cases import ModelPlan, build_on_device
from benchmarks.gpu.model.steps import Rows, build_step
from benchmarks.gpu.workloads import shared_prefix

REFERENCE: Rows = "padded"
"""The layout that runs in float32, on stock code only."""

CHECKED: tuple[Rows, ...] = ("varlen", "tree")
MAX_RATIO, MAX_NOISE = 1.25, 1e-5
"""The law's factor is 1.1 for a median over seeds; one draw has more room. The noise is that of float32."""


class WrongGradientError(Exception):
    """The tree step's gradient is further from float32's than rounding explains, so its speed means nothing."""


def check_gradients(plan: ModelPlan, device: str) -> Cell:
    """Relative L2 distance of whole gradients from float32's, by layout.

    Raises:
        WrongGradientError: the tree step's distance is over `MAX_RATIO` times that of packed flat sequences.
    """
    workload = shared_prefix(0.5, length=plan.checked_length, num_branches=4)
    tokens = workload.num_flat_tokens
    model = build_on_device(plan, device)
    found = {rows: _gradient(model, rows, workload, tokens) for rows in CHECKED}
    exact = _gradient(model.float(), REFERENCE, workload, tokens)
    errors = {str(rows): gradient_distance(gradient, exact) for rows, gradient in found.items()}
    flat, tree = errors["varlen"], errors["tree"]
    if not tree <= MAX_RATIO * flat + MAX_NOISE:
        raise WrongGradientError(f"the tree step's gradient is {tree:.2e} from float32, flat sequences' is {flat:.2e}")
    return {"kind": "gradient", "model": plan.shape.name, "errors": errors, "flat_tokens": tokens}


def gradient_distance(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative L2 distance of whole gradients, by name of the weight.

    Example: {"a": [3], "b": [4]} against {"a": [3], "b": [5]} is 1 / 5.83 = 0.171.
    """
    assert got.keys() == expected.keys()
    apart = sum(float((got[name].float() - exact).double().square().sum()) for name, exact in expected.items())
    whole = sum(float(exact.double().square().sum()) for exact in expected.values())
    return float((apart / whole) ** 0.5)


def _gradient(model: PreTrainedModel, rows: Rows, workload: Workload, tokens: int) -> dict[str, Tensor]:
    build_step(rows, "chunks", model, workload, tokens)()
    taken = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return taken
