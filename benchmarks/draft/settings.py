"""What `python -m benchmarks draft` can be told, and what it refuses before a file is read.

Knows names of drafters and ranges of numbers. Knows nothing of what a drafter does.
"""

import math
from dataclasses import dataclass

from benchmarks.draft.drafters import arctic as draft_arctic
from benchmarks.draft.drafters.ours import OURS
from benchmarks.draft.histories import Siblings
from treering.errors import InputError
from treering.history.budget.costs import VerifyCosts
from treering.history.draft.workspace import MAX_NODES

DRAFTERS = ("none", "ngram", "naive", "paper", "released", "arctic", *OURS)
DEFAULT = DRAFTERS[: DRAFTERS.index("treering_chain") + 1]
"""Without the ablation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What holds for all drafters alike.

    Attributes:
        drafters: some of `DRAFTERS`, in their order.
        max_draft: tokens per draft at most; None leaves each its own.
        limit_tokens: sampled tokens that are replayed, in whole tasks; None is all.
        siblings: whether a sample sees those of its task that ran before it, or all others.
        costs: of passes; None predicts no speedup.
        batch: rows of the pass that it is predicted for.
        match_drafts: drafted tokens per step that the row `treering` may have; None is what Arctic's best row has.

    Raises:
        InputError: a number out of range, or names that are none or give nothing to measure.

    Example: drafters ["treering", "arctic"] are kept as ("arctic", "treering").
    """

    drafters: tuple[str, ...]
    max_draft: int | None
    limit_tokens: int | None
    siblings: Siblings
    costs: VerifyCosts | None
    batch: int
    match_drafts: float | None

    def __post_init__(self) -> None:
        for name in ("max_draft", "limit_tokens", "batch"):
            _check_count(name, getattr(self, name))
        _check_names(self.drafters)
        _check_longest(self.drafters, self.max_draft)
        _check_match(self.drafters, self.match_drafts)
        object.__setattr__(self, "drafters", tuple(name for name in DRAFTERS if name in self.drafters))

    @property
    def has_rival(self) -> bool:
        """Whether Arctic's drafter will be replayed."""
        return "arctic" in self.drafters and draft_arctic.is_installed()


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        option = f"--{name.replace('_', '-')}"
        raise InputError(f"{option} must be at least 1, got {value}: correct it or leave it out")


def _check_names(drafters: tuple[str, ...]) -> None:
    unknown = [name for name in drafters if name not in DRAFTERS]
    if unknown or not drafters:
        got = ", ".join(unknown) or "none"
        raise InputError(f"--drafters are some of {', '.join(DRAFTERS)}, got {got}: correct them")
    if set(drafters) == {"arctic"} and not draft_arctic.is_installed():
        raise InputError(
            "--drafters need one that is installed, got arctic alone, which is not: `make peers` installs it apart "
            "from treering; or name others beside it"
        )


def _check_longest(drafters: tuple[str, ...], max_draft: int | None) -> None:
    """Ours would refuse it by themselves, minutes later, when it is their turn."""
    ours = [name for name in drafters if name in OURS]
    if ours and max_draft is not None and max_draft > MAX_NODES:
        raise InputError(
            f"--max-draft is at most {MAX_NODES} for {', '.join(ours)}, got {max_draft}: lower it, or name other "
            "--drafters"
        )


def _check_match(drafters: tuple[str, ...], match_drafts: float | None) -> None:
    if match_drafts is None:
        return
    if not 0 < match_drafts < math.inf:
        raise InputError(
            f"--match-drafts is a finite number of drafted tokens above 0, got {match_drafts}: give a rival's "
            "drafted_per_step"
        )
    if "treering" not in drafters:
        raise InputError(
            f"--match-drafts is for treering, got --drafters {', '.join(drafters)}: name treering among them"
        )
