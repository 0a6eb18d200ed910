"""What tokens per step would save: the costs of verification turn them into a predicted speedup.

Knows seconds by tokens of a pass. Knows nothing of how they were measured.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from treering.errors import InputError
from treering.history.budget.costs import VerifyCosts

DEFAULT_BATCH = 8


def read_costs(file: Path) -> VerifyCosts:
    """The costs of a JSON file: `{"num_tokens": [1, 8, 64], "seconds": [0.01, 0.012, 0.02]}`, also under `costs`.

    So a report of `python -m benchmarks engine` can be given as it is.

    Raises:
        InputError: a missing or bad file, or numbers that are no costs.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values = values.get("costs", values)
        num_tokens, seconds = np.array(values["num_tokens"]), np.array(values["seconds"], np.float64)
    except (OSError, AttributeError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{file}: costs are a JSON object with the lists num_tokens and seconds, by itself or under costs, and it "
            f"cannot be read so ({error!r}); correct it"
        ) from error
    if num_tokens.size and num_tokens.dtype.kind not in "iu":
        raise InputError(f"{file}: num_tokens are whole numbers, got {num_tokens.tolist()}; correct them")
    if not np.isfinite(seconds).all():
        raise InputError(f"{file}: seconds of a pass are finite, got {seconds.tolist()}; measure them again")
    try:
        return VerifyCosts(num_tokens=num_tokens.astype(np.int64), seconds=seconds)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def seconds_at(costs: VerifyCosts, num_tokens: float) -> float:
    """Seconds of a pass over so many tokens.

    Example: 1 token in 1 s and 3 in 2 s give 1.5 s for 2 tokens and 3 s for 5.
    """
    sizes, seconds = costs.num_tokens, costs.seconds
    beyond = num_tokens - float(sizes[-1])
    if beyond <= 0 or sizes.size == 1:
        return float(np.interp(num_tokens, sizes, seconds))
    return float(seconds[-1] + beyond * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))


def speedup(costs: VerifyCosts, row: Mapping[str, float], batch: int) -> float:
    """Of a batch whose rows all draft as `row` of a report does, over one without drafts; drafting's time counts.

    Example: 3 tokens per step, 1 drafted, nothing spent on drafting, batch 2: where 2 tokens cost 1 s and 4 cost 1.5 s,
    it is 2x.
    """
    drafting_s = 1e-6 * row["us_per_row"] * batch
    step_s = seconds_at(costs, batch * (1 + row["drafted_per_step"])) + drafting_s
    return row["tokens_per_step"] * seconds_at(costs, batch) / step_s
