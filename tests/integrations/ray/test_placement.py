"""What a Ray cluster cannot hold is refused before an actor waits for it."""

from collections.abc import Mapping

import pytest

from treering import extras
from treering.errors import ConfigError, MissingExtraError, StateError
from treering.integrations.ray import RayLauncher
from treering.integrations.ray.placement import check_hosts, check_node, check_resources, numbers_by_kind
from treering.runtime.ipc.launcher import Kind, Resources, resources_by_kind


def node(address: str = "10.0.0.1", *, cpus: float = 4.0, gpus: float | None = None, alive: bool = True) -> dict:
    resources = {"CPU": cpus} | ({} if gpus is None else {"GPU": gpus})
    return {"NodeID": address, "Alive": alive, "NodeManagerAddress": address, "Resources": resources}


def numbers(*, num_rollout_workers: int = 1, num_trainer_ranks: int = 1) -> Mapping[Kind, int]:
    return numbers_by_kind(num_rollout_workers=num_rollout_workers, num_trainer_ranks=num_trainer_ranks)


def test_a_cluster_with_room_for_all_is_accepted() -> None:
    # Two rollout workers and a trainer; reward workers reserve nothing.
    check_resources([node(cpus=3.0)], resources_by_kind(), numbers(num_rollout_workers=2))


def test_more_processes_than_cpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"ask for 4 CPUs where it has 3"):
        check_resources([node(cpus=3.0), node(alive=False)], resources_by_kind(), numbers(num_rollout_workers=3))


def test_every_rank_of_a_trainer_needs_room() -> None:
    with pytest.raises(ConfigError, match=r"4 trainer ranks ask for 5 CPUs where it has 4"):
        check_resources([node()], resources_by_kind(), numbers(num_trainer_ranks=4))


def test_gpus_that_no_node_has_are_refused() -> None:
    resources = resources_by_kind(trainer=Resources(num_gpus=1.0))
    with pytest.raises(ConfigError, match=r"ask for 1 GPUs where it has 0"):
        check_resources([node()], resources, numbers())


def test_a_process_larger_than_every_node_is_refused() -> None:
    resources = resources_by_kind(trainer=Resources(num_gpus=4.0))
    nodes = [node(gpus=2.0), node("10.0.0.2", gpus=2.0)]
    with pytest.raises(ConfigError, match=r"runtime\.resources\.trainer\.num_gpus = 4 is more than any has \(2\)"):
        check_resources(nodes, resources, numbers())


def test_several_hosts_need_an_address_that_they_reach() -> None:
    nodes = [node(), node("10.0.0.2")]
    check_hosts(nodes, listen="10.0.0.1")
    check_hosts([node(), node("10.0.0.2", alive=False)], listen="127.0.0.1")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, 10\.0\.0\.2"):
        check_hosts(nodes, listen="127.0.0.1")


def test_the_end_of_the_controllers_raylet_ends_the_run_instead_of_waiting() -> None:
    check_node([node(), node("10.0.0.2", alive=False)], "10.0.0.1")
    with pytest.raises(StateError, match="resume with the same command"):
        check_node([node(), node("10.0.0.2", alive=False)], "10.0.0.2")


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"pip install 'treering\[ray\]'"):
        RayLauncher(num_rollout_workers=1)
