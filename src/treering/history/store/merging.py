"""Adds rollouts to a prompt's index and keeps its newest versions."""

from collections.abc import Mapping

from treering.history.store.prompt_index import PromptIndex
from treering.history.store.rollouts import Rollouts


def with_rollouts(index: PromptIndex | None, new: Mapping[int, Rollouts], max_epochs: int) -> PromptIndex:
    """The index of what is there and new rollouts by version, behind those of the same version.

    Args:
        index: present one, None for a prompt without history.
        new: at least one version.
        max_epochs: versions that are kept, the newest ones.

    Example: versions 4 and 3, with rollouts of 5 and 4 added and two versions kept, give 5 and a longer 4.
    """
    merged = {} if index is None else _by_version(index)
    for version, rollouts in new.items():
        merged[version] = Rollouts.joined([merged[version], rollouts]) if version in merged else rollouts
    kept = sorted(merged, reverse=True)[:max_epochs]
    return PromptIndex.build(
        {version: merged[version].text for version in kept}, {version: merged[version].rewards for version in kept}
    )


def with_newest(index: PromptIndex, max_epochs: int) -> PromptIndex | None:
    """The index with so many of its newest versions, None where it has no rollouts."""
    while index.versions.size > max_epochs:
        rest = index.without_oldest()
        assert rest is not None
        index = rest
    return index if index.versions.size else None


def _by_version(index: PromptIndex) -> dict[int, Rollouts]:
    rewards = index.rewards_by_version()
    return {version: Rollouts(text=text, rewards=rewards[version]) for version, text in index.texts().items()}
