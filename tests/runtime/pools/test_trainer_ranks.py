"""How the ranks of a trainer are told apart, introduced and ended, without processes."""

import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from tests.rl.runs import PLAIN, options
from tests.runtime.pools.test_rollout_pool import QuietChild
from tests.runtime.runs import TinyRecipe
from treering.errors import StateError
from treering.runtime.ipc.messages import FetchState, Rendezvous, TrainerSettings
from treering.runtime.pools import trainer_client as trainer_ranks
from treering.runtime.pools.trainer_client import TrainerRanks
from treering.runtime.workers import trainer_worker

SETTINGS = TrainerSettings(recipe=TinyRecipe(), optim=PLAIN, options=options(), version=0, state=b"")
MEETING = Rendezvous(host="127.0.0.1", port=1)
LOST = RuntimeError("Connection closed by peer")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TrainerRanks:
    monkeypatch.setattr(trainer_ranks, "ChildProcess", QuietChild)
    made = TrainerRanks(3, None, time_limit_s=1.0)  # type: ignore[arg-type]
    made.start(SETTINGS)
    return made


def test_ranks_hear_where_to_meet_before_anything_else(ranks: TrainerRanks) -> None:
    children: list[Any] = ranks.children
    request = FetchState()
    ranks.send(request)
    children[0].says = [MEETING]
    assert ranks.receive() == ([], False)
    later = FetchState()
    ranks.send(later)
    # Each was offered the base, whose version is 0, at its start.
    assert children[0].sent == [0, request, later]
    assert children[1].sent == children[2].sent == [0, MEETING, request, later]


@pytest.mark.parametrize(("num_ranks", "error"), [(2, LOST), (1, LOST), (2, StateError("no connection of ours"))])
def test_a_rank_dies_of_another_s_end_and_raises_its_own_errors(
    num_ranks: int, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trainer_worker, "_train", fail)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    expected = SystemExit if num_ranks == 2 and error is LOST else type(error)
    with pytest.raises(expected):
        trainer_worker.run_trainer(None, None, replace(SETTINGS, num_ranks=num_ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "own", "expected"), [("127.0.0.1", "", "lo"), ("10.0.0.5", "", ""), ("::1", "x", "x")]
)
def test_on_loopback_torch_listens_there_unless_the_user_names_an_interface(
    host: str, own: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set first, so that it is restored after the test.
        monkeypatch.setenv(name, own)
        if not own:
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0"), (1, "lo")])
    monkeypatch.setattr(trainer_worker, "_listening", lambda *_: None)
    monkeypatch.setattr(trainer_worker.dist, "init_process_group", lambda *_, **__: None)
    trainer_worker.join_ranks(None, host, replace(SETTINGS, num_ranks=2))  # type: ignore[arg-type]
    assert [os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == [expected] * 2
