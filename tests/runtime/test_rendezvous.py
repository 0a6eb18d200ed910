"""How the ranks of a trainer meet and end, without processes."""

import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from tests.rl.runs import PLAIN, options
from tests.runtime.in_process import TestActors
from tests.runtime.runs import TinyRecipe
from tests.runtime.test_rollout_pool import QuietChild
from treering.errors import StateError
from treering.runtime import trainer_worker
from treering.runtime.account import Account
from treering.runtime.messages import Rendezvous, TrainerSettings
from treering.runtime.trainer_worker import TrainerClient, TrainerWorker
from treering.runtime.weight_store import WeightStore

SETTINGS = TrainerSettings(recipe=TinyRecipe(), optim=PLAIN, options=options(), state=b"")
MEETING = Rendezvous(host="127.0.0.1", port=1)
LOST = RuntimeError("Connection closed by peer")


def test_ranks_hear_where_to_meet_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_worker, "RunProcess", QuietChild)
    actors = TestActors()
    client = TrainerClient(SETTINGS, WeightStore(actors, 2), actors, num_ranks=3, time_limit_s=1.0, account=Account())
    children: list[Any] = client.processes
    client.train(1, [])
    children[0].says = [MEETING]
    assert client.receive() is None
    client.train(2, [])
    for child in children:
        meeting, first, second = child.sent
        assert meeting is MEETING
        assert (first.step, second.step) == (1, 2)


@pytest.mark.parametrize(("num_ranks", "error"), [(2, LOST), (1, LOST), (2, StateError("no connection of ours"))])
def test_a_rank_dies_of_another_s_end_and_raises_its_own_errors(
    num_ranks: int, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrainerWorker, "_meet", fail)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    expected = SystemExit if num_ranks == 2 and error is LOST else type(error)
    worker = TrainerWorker(replace(SETTINGS, num_ranks=2, rank=1))
    worker._settings = replace(SETTINGS, num_ranks=num_ranks)
    with pytest.raises(expected):
        worker.do(MEETING)


@pytest.mark.parametrize(("own", "expected"), [("", "lo"), ("x", "x")])
def test_on_loopback_torch_listens_there_unless_the_user_names_an_interface(
    own: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set first, so that it is restored after the test.
        monkeypatch.setenv(name, own)
        if not own:
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0"), (1, "lo")])
    trainer_worker.stay_on_loopback()
    assert [os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == [expected] * 2
