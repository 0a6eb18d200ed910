"""TRL's activation offloading where there is no device: what it would move to the host is counted, and stays there."""

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make trl-test")

from trl.models.activation_offloading import get_act_offloading_ctx_manager


def emulate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the host for the device, with TRL's own bookkeeping; the numbers of tensors that each pass moved follow."""
    moved: list[int] = []

    def context(model: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            # Streams and pinned memory are the device's; the rest of its code runs as it does there.
            made = get_act_offloading_ctx_manager(model=model, use_pin_memory=False, use_streams=False)
        stock = made.pack_hook

        def pack(tensor: torch.Tensor) -> int:
            number: int = stock(tensor)
            moved.append(int(made.tracker[number][1]))
            return number

        made.pack_hook = pack
        return made

    for kind in ("sft", "dpo", "kto"):
        monkeypatch.setattr(f"trl.trainer.{kind}_trainer.get_act_offloading_ctx_manager", context)
    return moved
