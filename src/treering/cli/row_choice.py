"""Choose the rows that `treering sft` trains on, by length and reward, and count them in notes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from treering.config.sft_config import DataConfig
from treering.data.trajectory import RenderedTrajectory, cut_images
from treering.errors import InputError, plural


class RowChoice:
    """Choice of rows by `max_length`, `overlong` and `min_reward` of [data], with counts.

    Example: with `max_length = 4` and `overlong = "cut"` a row of 6 tokens keeps its first 4.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._num_rows = self._num_overlong = self._num_low = self._num_unknown = 0
        self.num_untrained = 0
        """Number of rows that were cut before their first trained token."""
        self._num_rewards = 0
        self._least, self._most = inf, -inf

    def rows(self, rows: Iterable[RenderedTrajectory], location_of: Callable[[int], str]) -> list[RenderedTrajectory]:
        """Return the rows to train on; cut rows are shorter.

        Args:
            rows: of a file.
            location_of: gives the location of a trajectory by its index, for errors.

        Raises:
            InputError: a row is too long, and `overlong` is "error".
        """
        return [kept for row in rows if self._has_reward(row) and (kept := self._fitting(row, location_of)) is not None]

    def notes(self) -> list[str]:
        """Return notes on what was dropped or cut, and on rewards that no setting uses."""
        found = self.losses()
        if self._num_rewards and self._config.min_reward is None:
            seen = plural(self._num_rewards, "sequence has a reward", "sequences have rewards")
            found.insert(
                0,
                f"{seen}, {self._least:g} to {self._most:g}; all are trained alike, data.min_reward keeps the best",
            )
        return found

    def losses(self) -> list[str]:
        """Return notes on what was dropped or cut."""
        config, found = self._config, []
        if self._num_low or self._num_unknown:
            unknown = f", {self._num_unknown:,} of them without a reward" if self._num_unknown else ""
            found.append(
                f"{self._num_low + self._num_unknown:,} of {plural(self._num_rows, 'sequence')} dropped by "
                f"data.min_reward = {config.min_reward:g}{unknown}"
            )
        if self._num_overlong:
            what = "cut to" if config.overlong == "cut" else "dropped by"
            empty = f", {self.num_untrained:,} of them before their first trained token" if self.num_untrained else ""
            found.append(
                f"{self._num_overlong:,} of {plural(self._num_rows, 'sequence')} {what} data.max_length = "
                f"{config.max_length}{empty}"
            )
        return found

    def _has_reward(self, row: RenderedTrajectory) -> bool:
        self._num_rows += 1
        least = self._config.min_reward
        if row.reward is None:
            self._num_unknown += least is not None
            return least is None
        self._num_rewards += 1
        self._least, self._most = min(self._least, row.reward), max(self._most, row.reward)
        is_low = least is not None and row.reward < least
        self._num_low += is_low
        return not is_low

    def _fitting(self, row: RenderedTrajectory, location_of: Callable[[int], str]) -> RenderedTrajectory | None:
        limit = self._config.max_length
        if limit is None or row.tokens.size <= limit:
            return row
        if self._config.overlong == "error":
            raise InputError(
                f"{location_of(row.index)}: {row.tokens.size:,} tokens, above data.max_length = {limit}; "
                'raise it, or set data.overlong = "drop" or "cut"'
            )
        self._num_overlong += 1
        if self._config.overlong == "drop":
            return None
        cut = _cut(row, limit)
        self.num_untrained += bool(row.loss_mask[1:].any()) and not (cut is not None and cut.loss_mask[1:].any())
        return cut


def _cut(row: RenderedTrajectory, limit: int) -> RenderedTrajectory | None:
    """Return the first tokens of a row, up to an image that would be cut; None if the row begins with that image."""
    end = min([limit, *(placed.start for placed in row.images if placed.start < limit < placed.stop)])
    if not end:
        return None
    return replace(
        row,
        tokens=row.tokens[:end],
        loss_mask=row.loss_mask[:end],
        turn_ends=row.turn_ends[row.turn_ends <= end],
        advantages=None if row.advantages is None else row.advantages[:end],
        logprobs=None if row.logprobs is None else row.logprobs[:end],
        images=cut_images(row.images, end),
        routed_experts=None if row.routed_experts is None else row.routed_experts[:end],
    )
