"""`torch_compile`, activation offloading and checkpointing change no gradient, separately or together."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention import fake_flash
from tests.integrations.trl import runs
from tests.integrations.trl.test_exactness import GRADIENTS
from treering.integrations.trl import share_prefixes

# The tracer cannot read through the test run's type checks.
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
"""Traces forward and backward like the default backend, then runs them uncompiled, so no C++ compiler is needed."""
OFFLOADED = {"activation_offloading": True}
CHECKPOINTED = {"gradient_checkpointing": True}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.fixture(autouse=True)
def num_graphs() -> Iterator[Callable[[], int]]:
    """Backend that counts compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()


def emulated_offloading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offload with the host in place of the device, by TRL's own bookkeeping; yield the tensors moved in each pass.

    Tensors to be moved to the host are counted, and stay where they are.
    """
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    moved: list[int] = []

    def context(model: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            # Only a device has streams and pinned memory; the rest of its code runs as it does there.
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


@pytest.mark.parametrize(
    ("make", "settings", "options"),
    [
        (runs.sft, COMPILED | OFFLOADED, {}),
        (runs.grpo, COMPILED | CHECKPOINTED, {"beta": 0.1}),
        (runs.dpo, COMPILED | OFFLOADED | CHECKPOINTED, runs.model_and_options({"lora": True})[1]),
        (runs.kto, OFFLOADED | REENTRANT, {}),
    ],
    ids=["sft compiled offloaded", "grpo compiled checkpointed", "dpo all three lora", "kto offloaded reentrant"],
)
def test_gradients_are_those_of_the_stock_trainer_without_them(
    make: Any,
    settings: dict[str, Any],
    options: dict[str, Any],
    num_graphs: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = emulated_offloading(monkeypatch)
    stock = runs.train(make, runs.saved(), tmp_path / "stock", **options)
    assert (num_graphs(), sum(moved)) == (0, 0)
    ours = runs.train(make, runs.saved(), tmp_path / "ours", shared={"group_batches": False}, **settings, **options)
    assert runs.apart(ours.gradients, stock.gradients) <= GRADIENTS
    assert (num_graphs() > 0) == ("torch_compile" in settings)
    assert (sum(moved) > 0) == ("activation_offloading" in settings)


def of_many_shapes(num: int) -> Any:
    from datasets import Dataset

    rng = random.Random(8)
    task = runs.words(rng, 6)
    rows = []
    for _ in range(num):
        turns = [("user", f"{task} {runs.words(rng, rng.randrange(1, 9))}"), ("assistant", runs.words(rng, 4))]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return Dataset.from_list(rows)


@pytest.mark.parametrize(("backend", "most"), [("flash", 4), ("segments", 8)])
def test_twenty_micro_batches_of_other_shapes_run_the_same_few_graphs(
    backend: str, most: int, num_graphs: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers leave their graph for every backend but flash, so a layer is several graphs."""
    if backend == "flash":
        fake_flash.install(monkeypatch)
    options = {"train_dataset": of_many_shapes(40)}
    trainer = runs.sft(
        runs.saved(), tmp_path, max_steps=20, per_device_train_batch_size=2, trainer_options=options, **COMPILED
    )
    counts: list[int] = []
    recorder = runs.Recorder()
    trainer.add_callback(recorder)
    monkeypatch.setattr(recorder, "on_pre_optimizer_step", lambda *_, **__: counts.append(num_graphs()))
    share_prefixes(trainer, backend=backend, group_batches=False)
    trainer.train()
    assert len({log["tree/tokens_computed"] for log in recorder.logs[:20]}) > 8
    assert len(counts) == 20
    assert 0 < counts[0] == counts[-1] <= most
