"""The [router] section of every subcommand that trains: router losses of mixtures of experts. Imports no torch."""

from pydantic import Field

from treering.config.record import Config
from treering.config.values import NonNegative


class RouterLosses(Config):
    """Losses on routers, over all tokens of all branches; for mixtures of experts only."""

    balance: NonNegative | None = Field(
        default=None,
        description="Factor of the load-balancing loss, as Hugging Face's router_aux_loss_coef; 0: only measure it.",
    )
    z: NonNegative | None = Field(
        default=None, description="Factor of the mean squared log-sum-exp of router logits; 0: only measure it."
    )

    @property
    def is_set(self) -> bool:
        """Whether any router loss is trained or measured."""
        return self.balance is not None or self.z is not None
