"""One small Ray on this machine, shared by all tests on Ray."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from treering.runtime.ray_actors import RayActors

NUM_CPUS = 10
"""Logical CPUs: enough for two rollout workers, two trainer ranks, and their replacements."""

_OBJECT_STORE_BYTES = 200 << 20


def start_ray() -> None:
    """Start a Ray that only this process uses."""
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="warning",
    )


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: make ray-test")
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_process_group_cleanup_enabled", "1")
        # Ray would start a process for each CPU.
        environment.setenv("RAY_enable_worker_prestart", "0")
        environment.setenv("RAY_prestart_worker_first_driver", "0")
        start_ray()
        yield
        ray.shutdown()


@pytest.fixture
def actors(ray_here: None) -> RayActors:
    """Actors with two workers on Ray."""
    return RayActors(num_rollout_workers=2)
