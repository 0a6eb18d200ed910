"""Arctic's suffix decoding as a rival: the grid of its configurations, each replayed in a process of its environment.

Nothing of Arctic is imported here: the process reads tokens from a file and writes its totals to another.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft.histories import Plan
from benchmarks.draft.replay import OnDone
from benchmarks.peers.peer import PYTHON, run_peer
from treering.analysis.recording import Recorded
from treering.arrays import Int64Array

HINT = "Arctic's suffix decoding is not installed, so it was not measured; `make peers` installs it apart from treering"
MIN_TOKEN_PROB = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArcticConfig:
    """One configuration; vLLM's own is per request batch `global`, `path`, 24, 16 and 1."""

    scope: Literal["per_prompt", "global"]
    """What a cache holds: the history of the rollout's task, or all that is stored."""
    draft: Literal["path", "tree"]
    depth: int
    max_spec_tokens: int
    max_spec_factor: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `SuffixDecodingCache.speculate`."""
        return {
            "max_spec_tokens": self.max_spec_tokens,
            "max_spec_factor": self.max_spec_factor,
            "min_token_prob": MIN_TOKEN_PROB,
            "use_tree_spec": self.draft == "tree",
        }


def grid(plan: Plan) -> list[ArcticConfig]:
    """The configurations that a history is replayed with.

    Siblings and earlier rollouts get all scopes, shapes, depths and factors. Where history is empty or another task's,
    there is nothing to scope, and the lazy and the eager end of the grid are enough.
    """
    is_control = plan.history in ("none", "wrong_task")
    scopes: tuple[Literal["per_prompt", "global"], ...] = ("per_prompt",) if is_control else ("per_prompt", "global")
    shapes: tuple[Literal["path", "tree"], ...] = ("path", "tree")
    found = [
        ArcticConfig(
            scope=scope,
            draft=shape,
            depth=depth,
            max_spec_tokens=size,
            max_spec_factor=factor,
        )
        for scope, shape, (depth, size), factor in product(scopes, shapes, ((24, 16), (64, 32)), (1.0, 4.0))
    ]
    return [config for config in found if not is_control or (config.depth == 24) == (config.max_spec_factor == 1.0)]


def is_installed(python: Path = PYTHON) -> bool:
    """Whether `make peers` has installed it."""
    return any((python.parent.parent / "lib").glob("python*/site-packages/arctic_inference/suffix_decoding"))


def replay_arctic(
    recorded: Recorded, plan: Plan, configs: list[ArcticConfig], on_done: OnDone, python: Path = PYTHON
) -> list[dict[str, Any]]:
    """What each configuration reaches on a plan: rows of a report, without drafter and history.

    Raises:
        StateError: its process failed; the message ends with what it said last.
    """
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        for scope in {config.scope for config in configs}:
            arrays: Any = _arrays(recorded, plan, scope)
            np.savez(folder / f"{scope}.npz", **arrays)
        runs = [pool.submit(_run, folder, number, config, python) for number, config in enumerate(configs)]
        for run in runs:
            rows.append(run.result())
            on_done(len(rows) / len(configs))
    return rows


def _run(folder: Path, number: int, config: ArcticConfig, python: Path) -> dict[str, Any]:
    given, answer = folder / f"{config.scope}.npz", folder / f"{number}.json"
    settings = folder / f"config{number}.json"
    settings.write_text(json.dumps({"depth": config.depth, "arguments": config.arguments()}), encoding="utf-8")
    run_peer(python, "arctic.py", given, answer, settings)
    row: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return row | {"config": asdict(config)}


def _arrays(recorded: Recorded, plan: Plan, scope: str) -> dict[str, NDArray[Any]]:
    """What the replay script reads: the rollouts, and the changes of each one's cache before it begins."""
    caches = np.zeros(plan.order.size, np.int64) if scope == "global" else recorded.prompts[plan.order]
    nothing = np.empty(0, np.int64)
    cached: dict[int, Int64Array] = {}
    gained, lost = [], []
    for number, cache in enumerate(caches.tolist()):
        wanted = plan.sources(number) if scope == "per_prompt" else plan.pools[int(plan.waves[number])]
        present = cached.get(cache, nothing)
        gained.append(np.setdiff1d(wanted, present, assume_unique=True))
        lost.append(np.setdiff1d(present, wanted, assume_unique=True))
        cached[cache] = wanted
    return {
        "tokens": recorded.tokens,
        "is_sampled": recorded.run_ends > np.arange(recorded.tokens.size),
        "offsets": recorded.offsets,
        "starts": recorded.starts,
        "order": plan.order,
        "waves": plan.waves,
        "caches": caches,
        **_ragged("gained", gained),
        **_ragged("lost", lost),
    }


def _ragged(name: str, parts: list[Int64Array]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate(parts), f"{name}_ends": np.cumsum([part.size for part in parts])}
