"""The part vllm of `python -m benchmarks real`, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")

from benchmarks.common.progress import silent
from benchmarks.real import vllm as part
from benchmarks.vllm.runs import Asked

from tests.integrations.vllm.llms import build
from treering.cli.demo import DemoSize
from treering.errors import InputError

PROMPTS, SIZE, STOP = [[5, 6, 7], [8, 9, 10]], 12, 0


def save_models(folder: Path) -> Path:
    """Save a model that goes on, and as the weights after its first epoch one whose greedy token is always 0."""
    model = build(tied=True)
    model.save_pretrained(folder / "start")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(folder / "trl" / "grpo-engine" / "out" / "checkpoint-2")
    return folder / "start"


def test_each_epoch_samples_with_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(prompts=PROMPTS, group_size=2, max_tokens=SIZE, stop_token=STOP, temperature=0.0)
    monkeypatch.setattr(part, "asked_of", lambda *_: asked)
    monkeypatch.setattr(part, "in_trl", lambda *_: {})
    for name, value in {"METHODS": {"history": ("history", "")}, "ROWS": (4,), "TEMPERATURES": (0.0,)}.items():
        monkeypatch.setattr(part, name, value)
    found: dict[str, Any] = part.measure(
        tmp_path / "vllm", save_models(tmp_path), size=DemoSize(num_epochs=2), on_progress=silent
    )
    first, second = found["cases"][0]["epochs"]
    assert (first["num_tokens"], second["num_tokens"]) == (4 * SIZE, 4)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has 1; run --only trl first"):
        part.weights_of(tmp_path, save_models(tmp_path), 3)


def test_trl_trains_with_its_own_vllm_with_drafts_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(work: Any, kind: str, way: str, *_: Any) -> list[dict[str, Any]]:
        assert (work, kind) == (part.trl.train, "grpo")
        return [{"whole_s": 9.0, "sampling_s": 5.0}, {"whole_s": 3.0, "sampling_s": float(len(way))}]

    monkeypatch.setattr(part.trl, "alone", steps)
    found = part.in_trl(tmp_path, tmp_path, DemoSize(), silent)
    # The first step, which has the check, is left out.
    assert {way: each["processor_s"]["sampling"] for way, each in found.items()} == {"vllm": 4.0, "vllm_drafts": 11.0}
