"""The costs that decide where sharing pays, for the subcommands that train.

Knows the run folder's file of them. Knows nothing of what costs are used for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import nn

from treering.train.fit_costs import cached_costs
from treering.train.loop.compute import ComputeOptions, precision, prepare_model

COSTS_FILE = "costs.json"


def with_costs(
    compute: ComputeOptions, sharing: Literal["always", "measured"], model: nn.Module, run_dir: Path
) -> ComputeOptions:
    """The options with the costs of a run, fitted once and read by every resume; as they are where nothing is measured.

    Raises:
        StateError: the file is damaged.
    """
    if sharing == "always":
        return compute
    prepare_model(model, compute)
    with precision(model, compute.autocast):
        return replace(compute, costs=cached_costs(model, run_dir / COSTS_FILE))
