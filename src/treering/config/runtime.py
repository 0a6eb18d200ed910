"""The [runtime] section and the schedule of `treering train`. Imports no torch.

These settings change how long a run takes, never what it learns.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.config.values import NonNegative, Positive
from treering.errors import ConfigError

Schedule = Literal["fifo", "work_stealing", "longest_first", "equal_groups", "two_tier", "histopipe"]
"""Policies of `treering.schedule` that a run can use."""

Rebalancing = Literal["none", "queued", "running"]
"""See `treering.schedule.cluster`."""


LOOPBACK = "127.0.0.1"
"""Reached from this machine alone."""


class ProcessConfig(Config):
    """What Ray reserves for one process."""

    num_cpus: NonNegative = Field(default=1.0, description="Logical CPUs, which Ray counts and does not enforce.")
    num_gpus: NonNegative = Field(default=0.0, description="GPUs; a fraction shares one.")


class RewardProcessConfig(ProcessConfig):
    """What Ray reserves for one of two reward workers, of which one is spare."""

    num_cpus: NonNegative = Field(default=0.0, description="Logical CPUs, which Ray counts and does not enforce.")


class ResourcesConfig(Config):
    """What Ray reserves for each process."""

    rollout_worker: ProcessConfig = Field(default_factory=ProcessConfig, description="Of each rollout worker.")
    reward_worker: RewardProcessConfig = Field(
        default_factory=RewardProcessConfig, description="Of the reward worker, and of its spare."
    )
    trainer: ProcessConfig = Field(default_factory=ProcessConfig, description="Of the trainer.")


class RuntimeConfig(Config):
    """The processes of a run."""

    workers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Rollout workers, each a process; a trainer and a reward worker come on top. 0: everything in this "
        "process, one phase after another (off-switch).",
    )
    trainer_ranks: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="With workers: processes that train together, each with a shard of the model (FSDP2) and "
        "rl.num_train_threads threads; on CUDA each takes a device.",
    )
    reward_time_limit_s: Positive = Field(
        default=60.0,
        description="With workers: seconds that a reward may take; else its rollout is left out.",
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
    launcher: Literal["local", "ray"] = Field(
        default="local",
        description="With workers: what starts them. local: this machine. ray: Ray, as actors, in the cluster that "
        "RAY_ADDRESS names, else in one of its own on this machine; needs treering[ray].",
    )
    listen: str = Field(
        default=LOOPBACK,
        description="With ray: the IP address of this machine at which actors connect. On loopback all run on this "
        "machine; messages are authenticated, and not encrypted.",
    )
    resources: ResourcesConfig = Field(
        default_factory=ResourcesConfig, description="With ray: what it reserves for each process."
    )

    @model_validator(mode="after")
    def _check_launcher(self) -> Self:
        if self.launcher == "ray" and self.workers == 0:
            raise ConfigError(
                'runtime.launcher = "ray" starts workers, and runtime.workers is 0; set runtime.workers=1 or more'
            )
        if self.trainer_ranks > 1 and self.workers == 0:
            raise ConfigError(
                f"runtime.trainer_ranks = {self.trainer_ranks} train beside rollout workers, and runtime.workers is 0; "
                "set runtime.workers=1 or more, or start it by torchrun, where each rank samples too"
            )
        defaults = {"listen": LOOPBACK, "resources": ResourcesConfig()}
        own = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.launcher == "local" and own:
            raise ConfigError(
                f'runtime.{" and runtime.".join(own)} is for Ray, and runtime.launcher is "local"; set '
                'runtime.launcher = "ray", or remove it'
            )
        return self
