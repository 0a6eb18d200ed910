"""Adds rollouts to a prompt's index and keeps its newest versions."""

from collections.abc import Mapping

from treering.history.store.prompt_index import PromptIndex
from treering.history.store.rollouts import Rollouts


def with_rollouts(index: PromptIndex | None, new: Mapping[int, Rollouts], max_epochs: int) -> PromptIndex:
    """The index with new rollouts by version, appended to existing ones of the same version.

    Args:
        index: the present one, None for a prompt without history.
        new: at least one version.
        max_epochs: number of newest versions to keep.

    Example: adding rollouts of versions 5 and 4 to versions 4 and 3, with two versions kept, gives 5 and a longer 4.
    """
    merged = {} if index is None else _by_version(index)
    for version, rollouts in new.items():
        merged[version] = Rollouts.joined([merged[version], rollouts]) if version in merged else rollouts
    kept = sorted(merged, reverse=True)[:max_epochs]
    return PromptIndex.build(
        {version: merged[version].text for version in kept}, {version: merged[version].rewards for version in kept}
    )


def with_newest(index: PromptIndex, max_epochs: int) -> PromptIndex | None:
    """The index with so many of its newest versions, None if it has no rollouts."""
    while index.versions.size > max_epochs:
        rest = index.without_oldest()
        assert rest is not None
        index = rest
    return index if index.versions.size else None


def _by_version(index: PromptIndex) -> dict[int, Rollouts]:
    rewards = index.rewards_by_version()
    return {version: Rollouts(text=text, rewards=rewards[version]) for version, text in index.texts().items()}
