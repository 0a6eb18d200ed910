"""What passes cost the engine that drafts, as lists for a report: `python -m benchmarks draft --cost` reads them there.

Knows an engine in the middle of its rollouts. Knows nothing of what the costs are spent on.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.cases import OnProgress, Policy
from benchmarks.engine.drafting import CONTROL_BATCH_SIZE, MEASURED_DRAW, DraftingResult
from treering.engine.torch_engine import TorchEngine
from treering.train.loop.compute import num_threads


def measure_costs(
    policy: Policy, drafting: Sequence[DraftingResult], on_progress: OnProgress = lambda words: None
) -> dict[str, list[Any]]:
    """Seconds of a pass by its tokens at batch 8, with the threads that drafting was fastest with.

    Args:
        policy: whose rollouts run.
        drafting: what drafting came to, one of the results at batch 8.
        on_progress: told in words.

    Example: `{"num_tokens": [1, 2, 4, 8, 9], "seconds": [0.00021, 0.00024, 0.00028, 0.00035, 0.0004]}`, and so on up to
    64 tokens.
    """
    on_progress(f"what passes cost at batch {CONTROL_BATCH_SIZE}")
    result = next(one for one in drafting if one.batch_size == CONTROL_BATCH_SIZE)
    engine = TorchEngine(policy.model, max_batch=CONTROL_BATCH_SIZE)
    engine.submit(policy.requests(draw=MEASURED_DRAW))
    with num_threads(result.drafting.num_threads):
        # A pass costs what it sees, so rollouts run while it is measured.
        engine.step()
        costs = engine.measure_costs()
    return {"num_tokens": costs.num_tokens.tolist(), "seconds": costs.seconds.tolist()}
