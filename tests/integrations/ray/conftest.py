"""What the tests on Ray share: one small Ray on this machine for all of them."""

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from ipaddress import ip_address

import pytest

from treering.runtime.ipc.launcher import Launcher, Resources, resources_by_kind

NUM_CPUS = 10
"""Logical ones: enough for two rollout workers, two reward workers and two trainer ranks, and for those that replace
them."""

_OBJECT_STORE_BYTES = 200 << 20


def start_ray() -> None:
    """Starts a Ray of its own for this process."""
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="warning",
    )


def make_launcher(num_rollout_workers: int = 2, *, listen: str = "127.0.0.1") -> Launcher:
    """A launcher with little for each process."""
    from treering.integrations.ray import RayLauncher

    one = Resources(num_cpus=1.0)
    return RayLauncher(
        num_rollout_workers=num_rollout_workers,
        resources=resources_by_kind(rollout_worker=one, reward_worker=one, trainer=one),
        listen=listen,
    )


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray, on this machine."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: make ray-test")
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Actors import the tests' recipes.
        start_ray()
        yield
        ray.shutdown()


@pytest.fixture
def address() -> str:
    """An address of this machine that other hosts could reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Chooses a route, and sends nothing.
            probe.connect(("10.255.255.255", 1))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        found = str(probe.getsockname()[0])
    if ip_address(found).is_loopback:
        pytest.skip("this machine has no address but loopback")
    return found


@pytest.fixture
def launcher(ray_here: None) -> Launcher:
    """A new launcher."""
    return make_launcher()
