"""A group of completions after two images: the tree step against the stock model's padded batch, vision tower included.

Both compute the gradient of the mean negative log-probability of the completions, for every weight, on one thread. The
stock batch is that of a careful user: no padding is needed, and the head runs only on rows with loss.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import environment, interleaved_medians, one_thread, process_seconds
from benchmarks.images.cases import DEFAULT, Case, forest_of, model_of
from benchmarks.images.flops import step_flops
from benchmarks.images.memory import peak_bytes
from benchmarks.images.steps import WAYS

NOTE = "a group of completions after two images, on one thread; about a minute"
TABLES = {
    "": ("seconds", "peak_bytes", "speedup", "flop_bound", "share_of_bound", "gradient_difference"),
}


def measure(*, num_runs: int = 5, case: Case = DEFAULT, on_progress: OnProgress = silent) -> dict[str, Any]:
    """Times both ways in turn, in CPU time of this process: medians, the bound, the difference of the gradients."""
    model, forest = model_of(case), forest_of(case)
    grads: dict[str, dict[str, Tensor]] = {}

    def timed(name: str, compute: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            compute()
            own = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
            grads[name] = own

        return step

    steps = {name: timed(name, make(model, case)) for name, make in WAYS.items()}
    with one_thread():
        for step in steps.values():
            step()
        medians = interleaved_medians(steps, num_runs, process_seconds)
    flat, tree = step_flops(case, model, forest)
    speedup, bound = medians["padded_batch"] / medians["tree"], flat / tree
    return {
        "case": asdict(case),
        "seconds": medians,
        "speedup": speedup,
        "flop_bound": bound,
        "share_of_bound": speedup / bound,
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
        "peak_bytes": peak_bytes(case),
        "peak_bytes_without_sharing": peak_bytes(replace(case, num_completions=1)),
        "gradient_difference": difference(grads["tree"], grads["padded_batch"]),
        "num_runs": num_runs,
        "environment": environment(),
    }


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((actual[name] - grad).abs().max()) for name, grad in expected.items()) / largest
