"""What losses and layouts refuse together, in every section that has them.

This file knows the contradictions; it refuses to know any other setting.
"""

from treering.errors import ConfigError


def check_divisor(*, normalizer: str | None, divisor: float | None) -> None:
    """Refuses a divisor without its normaliser, and the other way round."""
    if (normalizer == "constant") != (divisor is not None):
        raise ConfigError(
            f'divisor belongs to normalizer = "constant", and here normalizer = "{normalizer}" with divisor = '
            f"{divisor}; set both, or neither"
        )


def check_packed(*, layout: str, normalizer: str | None) -> None:
    """Refuses a mean over trees where there are none."""
    if layout == "packed" and normalizer == "tree_mean":
        raise ConfigError(
            'layout = "packed" has no trees, and normalizer = "tree_mean" averages over them; set another '
            'normalizer, or layout = "tree"'
        )
