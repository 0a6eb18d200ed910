"""The device on which a group computes its small sums, by its backends."""

import pytest
import torch
import torch.distributed as dist

from treering.ranks.group import RankGroup


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda")],
)
def test_small_sums_take_the_host_where_a_backend_is_there(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backends.rsplit(":", 1)[1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert RankGroup(size=2)._device.type == device
