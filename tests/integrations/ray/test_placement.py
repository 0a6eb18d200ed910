"""What a Ray cluster cannot hold is refused before an actor waits for it."""

from collections.abc import Mapping
from typing import Any

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


ONE_GPU, FOUR_GPUS = (resources_by_kind(trainer=Resources(num_gpus=num)) for num in (1.0, 4.0))


@pytest.mark.parametrize(
    ("nodes", "resources", "num", "text"),
    [
        ([node(cpus=3.0), node(alive=False)], None, {"num_rollout_workers": 3}, "ask for 4 CPUs where it has 3"),
        ([node()], None, {"num_trainer_ranks": 4}, "4 trainer ranks ask for 5 CPUs where it has 4"),
        ([node()], ONE_GPU, {}, "ask for 1 GPUs where it has 0"),
        (
            [node(gpus=2.0), node("10.0.0.2", gpus=2.0)],
            FOUR_GPUS,
            {},
            r"runtime\.resources\.trainer\.num_gpus = 4 is more than any has \(2\)",
        ),
    ],
)
def test_what_a_cluster_or_a_node_has_no_room_for_is_refused_with_both_numbers(
    nodes: list[dict], resources: Any, num: dict[str, int], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_resources(nodes, resources or resources_by_kind(), numbers(**num))


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
