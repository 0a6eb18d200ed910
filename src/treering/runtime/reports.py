"""The account and the report of a finished step."""

from treering.rl.step_report import Overlap, Phases, RlStepReport, rollout_report
from treering.runtime.account import Account
from treering.runtime.controller import Finished


def settled(finished: Finished) -> Account:
    """The account of a finished step, with what its training says.

    Raises:
        StateError: a rollout is missing or counted twice.
    """
    run, trained = finished.run, finished.done.trained
    collected = run.collection.result()
    groups = zip(collected.groups, trained.group_advantages, strict=True)
    account = run.account
    account.reward_errors, account.empty = collected.num_reward_errors, collected.num_empty
    account.without_variance = sum(len(group.rollouts) for group, values in groups if not values.any())
    account.trained = 0 if trained.update is None else trained.update.num_branches
    account.check(run.step)
    return account


def report_of(finished: Finished, *, epoch: int, step_s: float) -> RlStepReport:
    """The report of a finished step that took `step_s`."""
    run, done = finished.run, finished.done
    return RlStepReport(
        step=run.step,
        epoch=epoch,
        version=finished.label,
        rollouts=rollout_report(
            run.collection.result(),
            num_zero_variance=done.trained.num_zero_variance,
            num_empty_groups=done.trained.num_empty_groups,
        ),
        engine=run.stats,
        update=done.trained.update,
        phases=Phases(
            rollout_s=run.ended_s - run.started_s, train_s=done.train_s, update_s=done.update_s, step_s=step_s
        ),
        overlap=Overlap(
            trainer_wait_s=finished.trainer_wait_s,
            bubble=finished.bubble,
            staleness=run.step - 1 - run.version,
            num_stolen=run.account.stolen,
            num_moved=run.account.moved,
            num_resampled=run.account.sampled_again,
        ),
    )
