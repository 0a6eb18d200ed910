"""Treering inside TRL: one line makes a trainer compute each shared prefix once.

    from treering.integrations.trl import share_prefixes

    trainer = GRPOTrainer(...)
    share_prefixes(trainer)
    trainer.train()

`TreeGRPOTrainer`, `TreeRLOOTrainer`, `TreeSFTTrainer` and `TreeDPOTrainer` are TRL's trainers with that line built in.
`HistoryRollouts` samples a trainer's rollouts with the embedded engine; `vllm_drafts` gives TRL's own vLLM drafts.
"""

from typing import TYPE_CHECKING

from treering.integrations.lazy import names_from

if TYPE_CHECKING:
    from treering.integrations.trl.rollouts import HistoryRollouts as HistoryRollouts
    from treering.integrations.trl.share import SharedPrefixes as SharedPrefixes
    from treering.integrations.trl.share import share_prefixes as share_prefixes
    from treering.integrations.trl.trainers import TreeDPOTrainer as TreeDPOTrainer
    from treering.integrations.trl.trainers import TreeGRPOTrainer as TreeGRPOTrainer
    from treering.integrations.trl.trainers import TreeRLOOTrainer as TreeRLOOTrainer
    from treering.integrations.trl.trainers import TreeSFTTrainer as TreeSFTTrainer
    from treering.integrations.trl.vllm_drafting import vllm_drafts as vllm_drafts
else:
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
    __all__ = [*_HOMES]
    __getattr__ = names_from(__name__, _HOMES, "torch", "transformers", "trl")
