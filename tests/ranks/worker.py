"""One rank of the tests, started by torchrun: runs every case in one process and saves the results."""

import datetime
import gc
import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import exact, guards, rl_loops

TIMEOUT_S = 60
PARTS = {
    "guards": guards.run_guards,
    "bfloat16": exact.run_in_bfloat16,
    "images": exact.run_images,
}


def main(folder: Path, before: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    parts = {
        # The same on any number of ranks.
        **(PARTS if size == 2 else {}),
        "exact": exact.run_cases,
        "rl_loops": partial(rl_loops.run_rl_loops, folder, before),
    }
    try:
        for name, part in parts.items():
            started = time.perf_counter()
            found[name] = part(size, rank)
            print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    except BaseException:
        found["failure"] = traceback.format_exc()
        raise
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # See `treering.cli.ranks.joined`.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(None if name == "-" else Path(name) for name in sys.argv[1:3]))
