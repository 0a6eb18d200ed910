"""Claim: weights reach a rollout worker in a time proportional to their size, on Ray in a few times the local one.

`python -m benchmarks weights` times, with real processes of both launchers, how long a trainer takes to publish weights
to the controller, and a rollout worker to load them, by size.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs, environment
from benchmarks.weights.roles import Done, Load, Publish, SizedRecipe, run_reader, run_writer
from benchmarks.weights.scale import NUM_WORKERS, controller_costs, scaled
from treering.errors import InputError, StateError
from treering.extras import require
from treering.runtime.ipc.launcher import Launcher, wait_for_any
from treering.runtime.ipc.local_launcher import LocalLauncher
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.ipc.weight_store import IncomingWeights, PublishedWeights, WeightStore

NOTE = "about two minutes; needs Ray (make ray-test sets an environment up) and four times the largest size of memory"
TABLES = {
    "sizes": ("size_mib", "seconds"),
    "scale": (*("num_workers", "num_rollouts", "load_s", "step_s", "step_without_load_s", "messages_s", "wakes_s"),),
}

SIZES_MIB = (10, 100, 500)
STORES = ("shared memory", "object store")
NUM_RUNS = 5
NUM_SLOTS = 2
TIME_LIMIT_S = 600.0


def measure(
    *,
    num_runs: int | None = None,
    sizes_mib: Sequence[int] = SIZES_MIB,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Hand-overs of weights of some MiB, multiples of ten, by store, and what they make of many workers."""
    runs = NUM_RUNS if num_runs is None else num_runs
    check_runs(runs)
    wrong = [size for size in sizes_mib if size < 10 or size % 10]
    if wrong:
        raise InputError(f"sizes are multiples of 10 MiB, got {wrong[0]}; give others")
    require("python -m benchmarks weights", "ray")
    found, costs = [], {}
    with _ray(max(sizes_mib)) as ray_version:
        for size in sizes_mib:
            on_progress(f"{size} MiB")
            seconds = {name: _hand_over(launcher, size, runs) for name, launcher in _launchers().items()}
            found.append({"size_mib": size, "seconds": seconds})
        on_progress("the controller's part")
        costs = {name: controller_costs(launcher) for name, launcher in _launchers().items()}
    on_progress("1 to 1,000 workers in virtual time")
    largest = found[-1]["seconds"]["object store"]
    hand_over_s = largest["publish_s"] + largest["load_s"]
    return {
        "sizes": found,
        "controller": costs,
        "scale": [scaled(count, hand_over_s, costs["object store"]) for count in NUM_WORKERS],
        "environment": environment(
            ray=ray_version, num_cores=os.cpu_count(), load_average=list(os.getloadavg()), runs=runs
        ),
        "notes": ["medians of wall times on one host; between hosts the network comes on top"],
    }


def _launchers() -> Mapping[str, Launcher]:
    from treering.integrations.ray import RayLauncher

    return dict(zip(STORES, (LocalLauncher(), RayLauncher(num_rollout_workers=1)), strict=True))


@contextmanager
def _ray(largest_mib: int) -> Iterator[str]:
    """A Ray of its own with room for the largest weights, and its version."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=(NUM_SLOTS + 3) * max(largest_mib, 50) << 20,
        include_dashboard=False,
        logging_level="warning",
    )
    try:
        yield str(ray.__version__)
    finally:
        ray.shutdown()


def _hand_over(launcher: Launcher, size_mib: int, num_runs: int) -> dict[str, float]:
    """Median seconds of each part; the first hand-over warms up."""
    recipe = SizedRecipe(num_tensors=size_mib // 10)
    model = recipe.make_model()
    store = launcher.open(recipe, model, NUM_SLOTS)
    writer = ChildProcess("writer", "trainer", run_writer, launcher, time_limit_s=TIME_LIMIT_S)
    reader = ChildProcess("reader", "rollout_worker", run_reader, launcher, time_limit_s=TIME_LIMIT_S)
    inbox = _Inbox(store)
    rounds: list[dict[str, float]] = []
    try:
        for child in (writer, reader):
            child.start(recipe)
        for child in (writer, reader):
            while not child.is_ready:
                inbox.receive(child)
        for version in range(1, num_runs + 2):
            rounds.append(_round(version, writer, reader, inbox, model))
    finally:
        writer.stop()
        reader.stop()
        store.close()
        launcher.close()
    return {part: median(each[part] for each in rounds[1:]) for part in rounds[0]}


def _round(version: int, writer: ChildProcess, reader: ChildProcess, inbox: "_Inbox", model: Any) -> dict[str, float]:
    writer.send(Publish(version=version))
    inbox.wait(writer)
    started = time.perf_counter()
    writer.send(Publish(version=version))
    inbox.wait(writer)
    published = time.perf_counter()
    reader.offer(version)
    reader.send(Load(version=version))
    value = inbox.wait(reader)
    loaded = time.perf_counter()
    inbox.store.read(version, model)
    read = time.perf_counter()
    if value != version:
        raise StateError(f"weights of version {version} have that value, and the worker read {value:g}; report this")
    return {
        "publish_s": published - started,
        "load_s": loaded - published,
        "controller_load_s": read - loaded,
    }


class _Inbox:
    """Receives the messages of a process, and stores the weights among them."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self._incoming = IncomingWeights()

    def wait(self, child: ChildProcess) -> float:
        """The answer of a process, once it has come."""
        while True:
            done = [message for message in self.receive(child) if isinstance(message, Done)]
            if done:
                return done[0].value

    def receive(self, child: ChildProcess) -> list[Any]:
        wait_for_any([child.connection], 1.0)
        messages, has_died = child.receive()
        if has_died:
            raise StateError(f"a process of the benchmark died with {child.stop().cause}; free memory and start again")
        for message in messages:
            weights = self._incoming.take(message) if isinstance(message, PublishedWeights) else None
            if weights is not None:
                self.store.put_bytes(message.version, weights)
        return messages
