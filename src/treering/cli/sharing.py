"""The costs that decide where sharing pays, for the subcommands that train.

Knows the run folder's file of them. Knows nothing of what costs are used for.
"""

from pathlib import Path
from typing import Literal

from torch import nn

from treering.train.compute import Autocast, GradientCheckpointing, enable_gradient_checkpointing, precision
from treering.train.fit_costs import cached_costs
from treering.tree.costs import CostModel

COSTS_FILE = "costs.json"


def sharing_costs(
    sharing: Literal["always", "measured"],
    model: nn.Module,
    run_dir: Path,
    *,
    autocast: Autocast,
    gradient_checkpointing: GradientCheckpointing,
) -> CostModel | None:
    """The costs of a run, fitted once and read by every resume; None where sharing is not measured.

    Raises:
        StateError: the file is damaged.
    """
    if sharing == "always":
        return None
    model.train()
    enable_gradient_checkpointing(model, gradient_checkpointing)
    with precision(model, autocast):
        return cached_costs(model, run_dir / COSTS_FILE)
