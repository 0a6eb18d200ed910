"""The public module of the objectives: `treering.objectives.sft`, `.grpo`, `.dpo` and the others.

They live in `treering.train.objectives`, which is imported (and torch with it) when a name is first used. Example:
`from treering.objectives import sft` loads torch, while `import treering.objectives` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treering.extras import require

if TYPE_CHECKING:
    from treering.train.objectives import dapo as dapo
    from treering.train.objectives import distill as distill
    from treering.train.objectives import dpo as dpo
    from treering.train.objectives import dr_grpo as dr_grpo
    from treering.train.objectives import grpo as cispo
    from treering.train.objectives import grpo as grpo
    from treering.train.objectives import ppo as ppo
    from treering.train.objectives import sequence_ratio as gspo
    from treering.train.objectives import sequence_ratio as rloo
    from treering.train.objectives import sft as sft

__all__ = ["cispo", "dapo", "distill", "dpo", "dr_grpo", "grpo", "gspo", "ppo", "rloo", "sft"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'treering.objectives' has no objective {name!r}; there are {', '.join(__all__)}")
    require(f"treering.objectives.{name}")
    return getattr(import_module("treering.train.objectives"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
