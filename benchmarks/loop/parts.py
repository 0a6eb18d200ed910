"""What parts of a loop gain alone, multiplied, beside what they gain together.

Knows step times and phases. Knows nothing of how they were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step and of its phases; phases that run side by side add up to more than the step."""

    step_s: float
    rollout_s: float
    train_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Factors over the plain loop, each the ratio of two step times."""

    factors: dict[str, float]
    """What each part gains alone; "overlap" is what it gains over the processes without it, because it needs them."""
    product: float
    """Of the factors."""
    whole: float
    """What all parts gain together, measured."""
    whole_of_product: float
    """Below 1: together they gain less than they promise alone."""
    by_phase: float
    """What the whole would gain if each part sped its phases up by what it did alone, and nothing else were in a step:
    the larger of the two phases where they overlap."""
    ladder: dict[str, float]
    """What each part gains on top of those before it; the product of these is the whole."""


def multiply(plain: StepTimes, alone: Mapping[str, StepTimes], ladder: Mapping[str, StepTimes]) -> Product:
    """Compares the parts with the whole, the last rung of the ladder.

    Args:
        plain: the loop without any part.
        alone: "tree", "drafts" and "runtime" added to it one at a time, and "overlap" added to "runtime".
        ladder: the parts added one after another, in order; the last has all.

    Example: steps of 8 s, 4 s with trees alone and 5 s with drafts alone promise 2 x 1.6 = 3.2. Where 7 s of the 8 are
    training, which only trees shorten, both together take 3 s: a whole of 2.67, which is 0.83 of the product.
    """
    factors = {name: plain.step_s / times.step_s for name, times in alone.items() if name != "overlap"}
    factors["overlap"] = alone["runtime"].step_s / alone["overlap"].step_s
    product = 1.0
    for factor in factors.values():
        product *= factor
    steps = [plain.step_s, *(times.step_s for times in ladder.values())]
    whole = steps[0] / steps[-1]
    return Product(
        factors=factors,
        product=product,
        whole=whole,
        whole_of_product=whole / product,
        by_phase=plain.step_s / _phases_s(plain, alone),
        ladder={name: before / after for name, before, after in zip(ladder, steps, steps[1:], strict=False)},
    )


def _phases_s(plain: StepTimes, alone: Mapping[str, StepTimes]) -> float:
    """Seconds of a step whose two phases overlap, each shortened by every part as that did alone."""
    rollout_s, train_s = plain.rollout_s, plain.train_s
    for name in ("tree", "drafts", "runtime"):
        rollout_s *= alone[name].rollout_s / plain.rollout_s
        train_s *= alone[name].train_s / plain.train_s
    return max(rollout_s, train_s)


def explain(product: Product) -> list[str]:
    """The difference between the product and the whole, in words.

    Example: a whole of 0.83 of the product is said to fall short of it by 17 %.
    """
    gap = product.whole_of_product - 1.0
    verb = "exceeds" if gap > 0 else "falls short of"
    losing = [name for name, factor in product.factors.items() if factor < 1.0]
    notes = [
        f"together {product.whole:.2f}x, which {verb} the product of the parts, {product.product:.2f}x, by "
        f"{abs(gap):.0%}: a part shortens one phase, and its factor for the whole step counts only as long as that "
        "phase has the share that it had in the plain loop",
        f"if every part shortened its phases as it did alone, and phases overlapped for nothing, it would be "
        f"{product.by_phase:.2f}x; what is measured below that is processes that share the processors, and hand-overs",
    ]
    if losing:
        notes.append(f"slower than without it: {', '.join(losing)}")
    return notes
