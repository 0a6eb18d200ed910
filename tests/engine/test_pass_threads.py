"""The engine switches from several threads to one if passes suddenly slow down and a clock may decide."""

import pytest
import torch
from torch import Tensor

from tests.models import build
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.pass_threads import NUM_ALONE, PassThreads
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.rl.trainer import Trainer


def counts_of(threads: PassThreads, passes: list[tuple[int, float]]) -> list[int | None]:
    """Return the threads after each pass, given as tokens and seconds."""
    found = []
    for num_tokens, seconds in passes:
        threads.note_pass(num_tokens, seconds)
        found.append(threads.count)
    return found


def test_three_passes_far_slower_than_their_like_end_the_use_of_several_threads_for_a_while() -> None:
    threads = PassThreads(2, is_free=True)
    # A larger pass may take longer, and a single slow pass may be chance.
    calm = [(16, 1.0), (1, 0.1), (512, 30.0), (16, 9.0), (16, 1.1), (16, 9.0), (16, 9.0)]
    assert counts_of(threads, calm) == [2] * len(calm)
    assert counts_of(threads, [(17, 9.0)] * (NUM_ALONE + 2)) == [1] * NUM_ALONE + [2, 2]


@pytest.mark.parametrize(("count", "is_free"), [(2, False), (1, True)])
def test_without_a_clock_or_with_one_thread_nothing_changes(count: int, is_free: bool) -> None:
    threads = PassThreads(count, is_free=is_free)
    assert set(counts_of(threads, [(16, 1.0), *[(16, 99.0)] * 9])) == {count}


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
