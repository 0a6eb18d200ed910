"""Where the tokens of the drawn rollouts came from, by a replay of the run's drafter over its stored rollouts.

A run does not record the source of an accepted draft token, so that the engine stays fast. The replay sees only the
drawn prompts, so its drafts may differ a little from those of the run.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from treering.analysis.recording import record
from treering.analysis.replay import replay
from treering.data import Trajectory, render
from treering.history.features import SOURCES
from treering.report.run import section_of
from treering.types import PromptId

LETTERS = "hsox"
"""One letter for each of `SOURCES`."""
GIVEN, SAMPLED = "g", "n"
_SETTINGS = ("max_draft", "min_acceptance", "shape", "sources")
_NOT_DRAFTED = -1


def num_history_epochs(config: Mapping[str, Any]) -> int:
    """Epochs that the history of a run keeps; 2, the default, where the settings do not say."""
    number = section_of(config, "history").get("max_epochs", 2)
    return number if isinstance(number, int) and number > 0 else 2


def has_drafts(config: Mapping[str, Any]) -> bool:
    """Whether a run drafts."""
    return section_of(config, "history").get("drafts") == "on"


def token_origins(
    epochs: Mapping[int, list[Trajectory]], prompts: Collection[PromptId], config: Mapping[str, Any]
) -> dict[PromptId, list[str]]:
    """A letter per token of each rollout of the newest epoch, in the order of the group.

    Args:
        epochs: rollouts by epoch, ascending.
        prompts: which ones are replayed.
        config: settings of the run.

    Returns:
        By prompt, a text per rollout: `GIVEN` for prompts and observations, `LETTERS` for drafted and accepted tokens,
        `SAMPLED` for the rest.

    Example: a rollout that repeats that of the epoch before, after a prompt of two tokens, begins with "ggn" or "ggh"
    and goes on with "h", but for one "n" per forward pass.
    """
    wanted = set(prompts)
    chosen = [each for rollouts in epochs.values() for each in rollouts if each.task_id in wanted]
    rendered = render(chosen)
    kept = [(each, one) for each, one in zip(chosen, rendered, strict=True) if one.loss_mask.any()]
    origins = np.full(sum(one.tokens.size for _, one in kept), _NOT_DRAFTED, np.int8)
    offsets = np.zeros(1, np.int64)
    if kept:
        recorded = record([each for each, _ in kept], [one for _, one in kept])
        replay(
            recorded, "all", max_epochs=num_history_epochs(config), settings=drafter_settings(config), origins=origins
        )
        offsets = recorded.offsets
    # A recording keeps the order within an epoch, as steps ascend in a run's files.
    pieces = iter([origins[begin:end] for begin, end in pairwise(offsets.tolist())])
    newest, found = max(epochs, default=0), dict[PromptId, list[str]]()
    for each, one in zip(chosen, rendered, strict=True):
        piece = next(pieces) if one.loss_mask.any() else np.zeros(one.tokens.size, np.int8)
        if each.epoch == newest:
            found.setdefault(each.task_id, []).append(_letters(piece, one.loss_mask))
    return found


def _letters(origins: np.ndarray[Any, np.dtype[np.int8]], mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    pairs = zip(origins.tolist(), mask.tolist(), strict=True)
    return "".join(
        GIVEN if not is_sampled else SAMPLED if origin == _NOT_DRAFTED else LETTERS[origin]
        for origin, is_sampled in pairs
    )


def drafter_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run's drafter; all sources if the run has none, as a replay says what drafts would have done.

    Example: a run with `history.max_draft = 5` alone in its settings has {"max_draft": 5} and all `SOURCES`.
    """
    given = {name: value for name, value in section_of(config, "history").items() if name in _SETTINGS}
    sources = tuple(given.get("sources", SOURCES))
    return given | {"sources": sources or SOURCES}
