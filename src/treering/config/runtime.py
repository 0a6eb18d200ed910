"""The [runtime] section and the schedule of `treering train`. Imports no torch.

These settings change the duration of a run, never its results.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Positive
from treering.errors import ConfigError

Schedule = Literal["fifo", "longest_first", "histopipe"]
"""Policies of `treering.schedule` that a run can use."""

Rebalancing = Literal["none", "queued", "running"]
"""Rollouts that may move between workers, see `treering.schedule.cluster`."""


class RuntimeConfig(Config):
    """Processes of a run."""

    workers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Rollout workers, each a Ray actor (needs treering[ray]), in addition to a trainer and a reward "
        "worker; workers and trainer ranks share the GPUs equally. 0: everything in this process, one phase after "
        "another (off-switch).",
    )
    trainer_ranks: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="With workers: processes that train together, each with a shard of the model (FSDP2) and "
        "OMP_NUM_THREADS threads; on CUDA each uses one device.",
    )
    reward_time_limit_s: Positive = Field(
        default=60.0,
        description="Seconds that a judge may take for an answer, in each of four attempts, and a reward of your own "
        "in its trial call and, with workers, in the run, where a slower call drops its rollout.",
    )
    worker_time_limit_s: Positive = Field(
        default=3600.0,
        description="With workers: seconds that a process may be silent while it has work, such as one training step; "
        "then it is replaced.",
    )
    rebalance: Rebalancing = Field(
        default="queued",
        description="With workers: rollouts that may move to another worker than assigned. queued: those that have not "
        "started. running: running ones too, if that saves more than the new prefill costs. none: no rollouts, and "
        "schedules use no measured times, so that batches depend on no clock.",
    )

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.trainer_ranks > 1 and self.workers == 0:
            raise ConfigError(
                f"runtime.trainer_ranks = {self.trainer_ranks} needs rollout workers, and runtime.workers is 0; "
                "set runtime.workers=1 or more, or start the run by torchrun, where each rank samples too"
            )
        return self
