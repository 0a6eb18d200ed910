"""Checks that a Ray cluster has room for a run, before an actor waits for ever for a place."""

from collections.abc import Mapping, Sequence
from typing import Any

from treering.errors import ConfigError, StateError
from treering.runtime.ipc.address import is_loopback
from treering.runtime.ipc.launcher import Kind, Resources

Node = Mapping[str, Any]
"""A node as `ray.nodes()` lists it."""

_NUM_REWARD_WORKERS = 2
"""One that works and a spare."""


def check_hosts(nodes: Sequence[Node], *, listen: str) -> None:
    """Checks that actors on all hosts can reach the controller.

    Raises:
        ConfigError: there are several hosts, and the controller listens on loopback.
    """
    hosts = sorted({node["NodeManagerAddress"] for node in _alive(nodes)})
    if len(hosts) > 1 and is_loopback(listen):
        raise ConfigError(
            f"actors connect to the controller, and on {listen} those on other hosts do not reach it; the cluster has "
            f"{', '.join(hosts)}: set runtime.listen to this host's address among them"
        )


def numbers_by_kind(*, num_rollout_workers: int, num_trainer_ranks: int) -> Mapping[Kind, int]:
    """Processes of each kind in a run."""
    return {
        "rollout_worker": num_rollout_workers,
        "reward_worker": _NUM_REWARD_WORKERS,
        "trainer": num_trainer_ranks,
    }


def check_resources(nodes: Sequence[Node], resources: Mapping[Kind, Resources], numbers: Mapping[Kind, int]) -> None:
    """Checks that every process fits a node, and all of them the cluster.

    Raises:
        ConfigError: they do not.
    """
    for resource, unit in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        free = [float(node["Resources"].get(resource, 0.0)) for node in _alive(nodes)]
        needs = {kind: float(getattr(each, unit)) for kind, each in resources.items()}
        total = sum(number * needs[kind] for kind, number in numbers.items())
        if total > sum(free):
            raise ConfigError(
                "the cluster has what runtime.resources asks for, and "
                f"{numbers['rollout_worker']} rollout workers, {numbers['reward_worker']} reward workers and "
                f"{numbers['trainer']} trainer ranks ask for {total:g} {resource}s where it has {sum(free):g}; lower "
                f"runtime.resources.*.{unit}, runtime.workers or runtime.trainer_ranks"
            )
        for kind, need in needs.items():
            if need > max(free, default=0.0):
                raise ConfigError(
                    f"a process runs on one node, and runtime.resources.{kind}.{unit} = {need:g} is more than any "
                    f"has ({max(free, default=0.0):g}); lower it"
                )


def check_node(nodes: Sequence[Node], node_id: str) -> None:
    """Checks that the node of the controller is alive.

    Raises:
        StateError: its raylet has died, so no actor can start.
    """
    if any(node["NodeID"] == node_id for node in _alive(nodes)):
        return
    raise StateError(
        "Ray starts actors through the raylet of the controller's host, and that has died; start Ray again there if it "
        "is your own, then resume with the same command"
    )


def _alive(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node["Alive"]]
