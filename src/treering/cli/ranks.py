"""Join the processes that torchrun started; only the first prints and writes.

If one fails or gets a signal, all end, and the first to fail reports why: it leaves a mark in torchrun's store before
the others can notice that it is gone.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from treering.errors import StateError

_STORE_TIMEOUT = timedelta(seconds=3)


def num_started() -> int:
    """Return the number of processes that torchrun started; 1 without it.

    Example: `torchrun --no-python --nproc-per-node 2 treering sft run.toml` starts 2.
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this process prints and writes."""
    return num_started() == 1 or os.environ.get("RANK", "0") == "0"


def speaks_of_end() -> bool:
    """Return whether this process reports why all of them end: the first to ask does; asking again changes nothing.

    If torchrun's store cannot be reached, rank 0 does.
    """
    if num_started() == 1:
        return True
    key = f"treering/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        import torch.distributed as dist

        own = os.environ["RANK"]
        # Use a separate connection: another thread may be waiting in torch's.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_STORE_TIMEOUT
        )
        return bool(store.compare_set(key, "", own).decode() == own)
    except (ImportError, RuntimeError, LookupError, ValueError):
        return is_first()


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes by torch.distributed; do nothing without torchrun.

    On CUDA each process uses the device of its local rank. After an error the process must end at once: its pending
    work with the others never finishes.

    Raises:
        StateError: another process has ended.
    """
    if num_started() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from treering.ranks.group import is_of_another

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo")
        yield
    except BaseException as error:
        # The others wait as long as this process lives.
        speaks_of_end()
        if not is_of_another(error):
            raise
        words = " ".join(str(error).split())[:200]
        raise StateError(
            f"rank {os.environ['RANK']} found that another rank has ended ({words}): start the same command again, "
            "which resumes the run"
        ) from error
    # Collect reference cycles now: a sharded model in one would end its threads after the group's, which aborts.
    gc.collect()
    dist.destroy_process_group()
