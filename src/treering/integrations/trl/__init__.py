"""Treering inside TRL: one line makes a trainer compute each shared prefix once.

    from treering.integrations.trl import share_prefixes

    trainer = GRPOTrainer(...)
    share_prefixes(trainer)
    trainer.train()

`TreeGRPOTrainer`, `TreeRLOOTrainer`, `TreeSFTTrainer` and `TreeDPOTrainer` are TRL's trainers with that line in them.
`HistoryRollouts` samples a trainer's rollouts with the embedded engine; `vllm_drafts` gives TRL's own vLLM drafts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.integrations.trl.rollouts import HistoryRollouts as HistoryRollouts
    from treering.integrations.trl.share import SharedPrefixes as SharedPrefixes
    from treering.integrations.trl.share import share_prefixes as share_prefixes
    from treering.integrations.trl.trainers import TreeDPOTrainer as TreeDPOTrainer
    from treering.integrations.trl.trainers import TreeGRPOTrainer as TreeGRPOTrainer
    from treering.integrations.trl.trainers import TreeRLOOTrainer as TreeRLOOTrainer
    from treering.integrations.trl.trainers import TreeSFTTrainer as TreeSFTTrainer
    from treering.integrations.trl.vllm_drafting import vllm_drafts as vllm_drafts

_HOMES = {
    "HistoryRollouts": "rollouts",
    "SharedPrefixes": "share",
    "TreeDPOTrainer": "trainers",
    "TreeGRPOTrainer": "trainers",
    "TreeRLOOTrainer": "trainers",
    "TreeSFTTrainer": "trainers",
    "share_prefixes": "share",
    "vllm_drafts": "vllm_drafting",
}
__all__ = [
    "HistoryRollouts",
    "SharedPrefixes",
    "TreeDPOTrainer",
    "TreeGRPOTrainer",
    "TreeRLOOTrainer",
    "TreeSFTTrainer",
    "share_prefixes",
    "vllm_drafts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    from treering.extras import require

    require(f"{__name__}.{name}", "torch", "transformers", "trl")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
