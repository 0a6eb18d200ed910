"""Adds rollouts to a prompt's index and keeps its newest versions."""

from collections.abc import Mapping

import numpy as np

from treering.arrays import Int32Array
from treering.history.store.prompt_index import PromptIndex


def with_rollouts(index: PromptIndex | None, new: Mapping[int, Int32Array], max_epochs: int) -> PromptIndex:
    """The index with new rollouts, appended to existing ones of the same version.

    Args:
        index: the present one, None for a prompt without history.
        new: at least one version -> int32, see `as_text`.
        max_epochs: number of newest versions to keep.

    Example: adding rollouts of versions 5 and 4 to versions 4 and 3, with two versions kept, gives 5 and a longer 4.
    """
    texts = {} if index is None else index.texts()
    for version, text in new.items():
        texts[version] = np.concatenate([texts[version], text]) if version in texts else text
    return PromptIndex.build({version: texts[version] for version in sorted(texts, reverse=True)[:max_epochs]})


def with_newest(index: PromptIndex, max_epochs: int) -> PromptIndex | None:
    """The index with so many of its newest versions, None if it has no rollouts."""
    while index.versions.size > max_epochs:
        rest = index.without_oldest()
        assert rest is not None
        index = rest
    return index if index.versions.size else None
