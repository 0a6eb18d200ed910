"""The public module of the objectives: `treering.objectives.sft`, `.grpo`, `.dpo` and the others.

An objective is imported, and torch with it, when its name is first used. Example: `from treering.objectives import sft`
loads torch, `import treering.objectives` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treering.config.objective_names import BUILT_IN
from treering.config.objective_names import register as register
from treering.extras import require

if TYPE_CHECKING:
    # For editors and type checkers.
    from treering.train.objective import Entries as Entries
    from treering.train.objective import Objective as Objective
    from treering.train.objective import Terms as Terms
    from treering.train.objectives.cispo import cispo as cispo
    from treering.train.objectives.dapo import dapo as dapo
    from treering.train.objectives.distill import distill as distill
    from treering.train.objectives.dpo import dpo as dpo
    from treering.train.objectives.dr_grpo import dr_grpo as dr_grpo
    from treering.train.objectives.grpo import grpo as grpo
    from treering.train.objectives.gspo import gspo as gspo
    from treering.train.objectives.ppo import ppo as ppo
    from treering.train.objectives.rloo import rloo as rloo
    from treering.train.objectives.sft import sft as sft
    from treering.train.policy_loss import policy_objective as policy_objective

_FOR_CUSTOM = {
    "Entries": "treering.train.objective",
    "Objective": "treering.train.objective",
    "Terms": "treering.train.objective",
    "policy_objective": "treering.train.policy_loss",
}
"""Parts of a custom objective."""

# The documentation's parser refuses a list display with unpacked names.
__all__ = list((*BUILT_IN, *_FOR_CUSTOM, "register"))  # noqa: C410


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'treering.objectives' has no objective {name!r}; there are {', '.join(__all__)}")
    require(f"treering.objectives.{name}")
    return getattr(import_module(_FOR_CUSTOM.get(name, f"treering.train.objectives.{name}")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
