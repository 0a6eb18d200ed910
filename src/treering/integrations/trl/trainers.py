"""TRL's trainers with prefix sharing built in; they take TRL's own configurations."""

from typing import Any

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

from treering.integrations.trl.share import SharedPrefixes, share_prefixes


class _Sharing:
    shared_prefixes: SharedPrefixes

    def __init__(
        self,
        *args: Any,
        backend: str = "auto",
        group_batches: bool | None = None,
        verify_first: bool = True,
        **kwargs: Any,
    ) -> None:
        """Create TRL's trainer from its own arguments, and call `share_prefixes` with the options given here."""
        super().__init__(*args, **kwargs)
        self.shared_prefixes = share_prefixes(
            self, backend=backend, group_batches=group_batches, verify_first=verify_first
        )


class TreeGRPOTrainer(_Sharing, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with `share_prefixes`; takes a GRPOConfig."""


class TreeRLOOTrainer(_Sharing, RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer with `share_prefixes`; takes an RLOOConfig."""


class TreeSFTTrainer(_Sharing, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with `share_prefixes`; takes an SFTConfig."""


class TreeDPOTrainer(_Sharing, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer with `share_prefixes`; takes a DPOConfig."""
