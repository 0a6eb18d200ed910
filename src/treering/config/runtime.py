"""The [runtime] section, the schedule and the length predictor of `treering train`. Imports no torch.

These settings change how long a run takes, never what it learns.
"""

from typing import Annotated, Literal

from pydantic import Field

from treering.config.load import Config
from treering.config.values import Positive

Schedule = Literal[
    "fifo", "work_stealing", "longest_first", "equal_groups", "two_tier", "equal_work", "halves", "histopipe"
]
"""Policies of `treering.schedule` that a run can use."""

Lengths = Literal["median", "ema", "quantile"]
"""Predictors of `treering.schedule.predict.lengths`."""

Rebalancing = Literal["none", "queued", "running"]
"""See `treering.schedule.cluster`."""


class RuntimeConfig(Config):
    """The processes of a run."""

    workers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Rollout workers, each a process; a trainer and a reward worker come on top. 0: everything in this "
        "process, one phase after another (off-switch).",
    )
    reward_time_limit_s: Positive = Field(
        default=60.0,
        description="With workers: seconds that a reward or an observation may take; else its rollout is left out.",
    )
    worker_time_limit_s: Positive = Field(
        default=3600.0,
        description="With workers: seconds that a process may be silent while it has work, a training step at most; "
        "then it is replaced.",
    )
    rebalance: Rebalancing = Field(
        default="queued",
        description="With workers: what may move to another worker than planned. queued: rollouts that have not "
        "started. running: running ones too, if that saves more than the new prefill costs. none: nothing, and plans "
        "use no measured times, so that batches depend on no clock.",
    )
