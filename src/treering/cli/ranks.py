"""`treering` under torchrun: joins the processes that it started, of which the first one alone speaks and writes."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from treering.errors import ConfigError


def num_started() -> int:
    """Processes that torchrun started; 1 without it.

    Example: `torchrun --nproc-per-node 2 -m treering.cli.start sft run.toml` starts 2.
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return num_started() == 1 or os.environ.get("RANK", "0") == "0"


def refuse_torchrun(command: str, instead: str) -> None:
    """Refuses to run a subcommand on several ranks.

    Raises:
        ConfigError: torchrun started several processes; `instead` is what to use.
    """
    if num_started() > 1:
        raise ConfigError(f"{command} starts its own processes, and torchrun started {num_started()}: {instead}")


@contextmanager
def joined() -> Iterator[None]:
    """Context manager in which torch.distributed connects the processes; alone it does nothing.

    On CUDA each process takes the device of its local rank.
    """
    if num_started() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo")
    try:
        yield
    finally:
        # What is left of a sharded model in reference cycles would end its threads after those of the group: an abort.
        gc.collect()
        dist.destroy_process_group()
