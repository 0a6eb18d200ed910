"""A small model samples and trains on one thread, unless a setting gives another number."""

import pytest
import torch
from torch import Tensor

from tests.models import build
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.rl.trainer import Trainer


@pytest.mark.parametrize(("given", "expected"), [(None, 1), (2, 2)])
def test_engine_and_training_run_a_small_model_on_one_thread_by_default(
    given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model, seen = build(), set[int]()
        engine = TorchEngine(model, num_threads=given, costs="none")
        run = engine._decoder.run

        def noting(batch: object) -> Tensor:
            seen.add(torch.get_num_threads())
            return run(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._decoder, "run", noting)
        list(engine.generate([Request(prompt_id="p", prompt=[1, 2], sampling=Sampling(max_tokens=2))]))
        assert seen == {expected}
        options = RlOptions(prompts_per_step=1, group_size=2, sampling=Sampling(max_tokens=2), num_train_threads=given)
        trainer = Trainer(model, OptimOptions(learning_rate=1e-3), options)
        monkeypatch.setattr(trainer, "_train", lambda *_: torch.get_num_threads())
        assert trainer.train(1, []) == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
