"""Processes under torchrun: exactly one of those that end prints the reason."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from treering.cli.ranks import joined, speaks_of_end
from treering.errors import InputError, StateError


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> "Ask":
    return Ask(monkeypatch)


class Ask:
    """Ask as a rank of three would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.set(WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="0")

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def __call__(self, rank: int) -> bool:
        self.set(RANK=str(rank))
        return speaks_of_end()


def test_the_first_that_ends_speaks_however_often_it_asks(ask: Ask) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=9))  # type: ignore[attr-defined]
    ask.set(MASTER_PORT=str(store.port))
    assert [ask(rank) for rank in (2, 0, 2, 1)] == [True, False, True, False]
    # Another start of the same processes.
    ask.set(TORCHELASTIC_RESTART_COUNT="1")
    assert [ask(rank) for rank in (1, 2)] == [True, False]


def test_rank_0_speaks_where_nobody_can_be_asked(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.cli.ranks._STORE_TIMEOUT", timedelta(milliseconds=300))
    assert [ask(rank) for rank in (0, 1)] == [True, False]


def test_processes_that_know_of_no_store_do_not_need_one(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert speaks_of_end()


def test_one_process_speaks(ask: Ask) -> None:
    ask.set(WORLD_SIZE="1")
    assert ask(0)


def test_on_cuda_a_rank_has_a_device_before_nccl_starts_and_the_host_for_small_sums(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    ask.set(RANK="11", LOCAL_RANK="3")
    with joined():
        assert calls == [3, "cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize(
    ("error", "kind", "pattern"),
    [
        (
            RuntimeError("[gloo/pair.cc:5] Connection closed by peer [::1]"),
            StateError,
            "another rank has ended.*resumes",
        ),
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
        (InputError("a connection is no number"), InputError, "no number"),
    ],
)
def test_an_error_of_the_transport_means_that_another_rank_has_ended(
    error: Exception, kind: type[Exception], pattern: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treering.cli.ranks._STORE_TIMEOUT", timedelta(milliseconds=300))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    ask.set(RANK="0", LOCAL_RANK="0")
    with pytest.raises(kind, match=pattern), joined():
        raise error
