"""`treering` under torchrun: joins the processes that it started, of which the first one alone speaks and writes.

Where one fails or gets a signal, all end, and the one that was first says why: it leaves a mark in torchrun's store
before the others can notice that it is gone.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from treering.errors import StateError

_STORE_TIMEOUT = timedelta(seconds=3)


def num_started() -> int:
    """Processes that torchrun started; 1 without it.

    Example: `torchrun --no-python --nproc-per-node 2 treering sft run.toml` starts 2.
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return num_started() == 1 or os.environ.get("RANK", "0") == "0"


def speaks_of_end() -> bool:
    """Whether this process says why all of them end: the one that asks first does; asking again changes nothing.

    Rank 0 does where torchrun's store cannot be reached.
    """
    if num_started() == 1:
        return True
    key = f"treering/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        import torch.distributed as dist

        own = os.environ["RANK"]
        # A connection of its own: another thread may be waiting in that of torch.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_STORE_TIMEOUT
        )
        return bool(store.compare_set(key, "", own).decode() == own)
    except (ImportError, RuntimeError, LookupError, ValueError):
        return is_first()


@contextmanager
def joined() -> Iterator[None]:
    """Context manager in which torch.distributed connects the processes; alone it does nothing.

    On CUDA each process takes the device of its local rank. After an error the process is to end at once: what it has
    begun with the others is never finished.

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
            f"ranks train one model together, and rank {os.environ['RANK']} finds that another one has ended "
            f"({words}): start the same command again, which resumes the run"
        ) from error
    # What is left of a sharded model in reference cycles would end its threads after those of the group: an abort.
    gc.collect()
    dist.destroy_process_group()
