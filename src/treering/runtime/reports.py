"""The account and the report of a finished step."""

from collections.abc import Sequence

import numpy as np

from treering.engine.rollout import RolloutKey
from treering.rl.collect import Group
from treering.rl.step_report import Overlap, Phases, RlStepReport, rollout_report
from treering.rl.trainer import Trained
from treering.runtime.account import Account
from treering.runtime.controller import FinishedStep


def settle_account(finished: FinishedStep) -> Account:
    """The account of a finished step, with the counts of its training.

    Raises:
        StateError: a rollout is missing or counted twice.
    """
    open_step, trained = finished.open_step, finished.done.trained
    collected = open_step.collection.result()
    account = open_step.account
    account.reward_errors, account.unscored = collected.num_reward_errors, collected.num_unscored
    account.empty = collected.num_empty
    kept = {rollout.key for group in collected.groups for rollout in group.rollouts}
    used = _trained_branches(collected.groups, trained)
    num_lost = len(used) - (0 if trained.update is None else trained.update.num_branches)
    account.trained = len(set(used)) - num_lost
    account.without_variance = len(kept - set(used))
    account.check(open_step.step)
    return account


def _trained_branches(groups: Sequence[Group], trained: Trained) -> list[RolloutKey]:
    """The keys of the branches that an update has to have: a run has one for each of its branches."""
    keys = [[rollout.key for rollout in group.rollouts] for group in groups]
    # A KL in the loss trains groups with equal rewards too.
    has_all = trained.num_rollouts == sum(map(len, keys))
    pairs = zip(keys, trained.group_advantages, strict=True)
    return [key for of_group, values in pairs if has_all or any(map(np.any, values)) for key in of_group]


def report_of(finished: FinishedStep, *, epoch: int, step_s: float) -> RlStepReport:
    """The report of a finished step that took `step_s` seconds."""
    open_step, done = finished.open_step, finished.done
    return RlStepReport(
        step=open_step.step,
        epoch=epoch,
        version=finished.policy_version,
        rollouts=rollout_report(
            open_step.collection.result(),
            num_zero_variance=done.trained.num_zero_variance,
            num_empty_groups=done.trained.num_empty_groups,
        ),
        engine=open_step.stats,
        update=done.trained.update,
        phases=Phases(
            rollout_s=open_step.ended_s - open_step.started_s,
            train_s=done.train_s,
            update_s=done.update_s,
            step_s=step_s,
        ),
        overlap=Overlap(
            trainer_wait_s=finished.trainer_wait_s,
            bubble=finished.bubble,
            staleness=open_step.step - 1 - open_step.version,
            num_stolen=open_step.account.stolen,
            num_moved=open_step.account.moved,
            num_resampled=open_step.account.sampled_again,
            spans=finished.spans,
        ),
    )
