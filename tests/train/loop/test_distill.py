"""In the SFT loop with a teacher, both layouts give the same losses, and the student approaches the teacher."""

import pytest
import torch

from tests.models import build
from tests.train.loop.runs import tiny_tasks
from treering.config.model import DistillOptions
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.errors import ConfigError, InputError
from treering.train.loop.sft_loop import SftLoop

TEACHER = build("llama", seed=3).eval()
OPTIM = OptimOptions(learning_rate=1e-2)


def loop_of(how: DistillOptions | None, teacher: torch.nn.Module | None = TEACHER, **options: object) -> SftLoop:
    chosen = SftOptions(trees_per_step=5, max_batch_tokens=100, distill=how, **options)  # type: ignore[arg-type]
    return SftLoop(build(), tiny_tasks(), optim=OPTIM, options=chosen, teacher=teacher)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_both_layouts_distill_alike(weight: float | None) -> None:
    how = DistillOptions(divergence="jsd", top_k=8, weight=weight)
    loops = [loop_of(how, layout=layout) for layout in ("tree", "packed")]
    reports = [[loop.step() for _ in range(2)] for loop in loops]
    for tree, packed in zip(*reports, strict=True):
        assert tree.update.loss == pytest.approx(packed.update.loss, rel=1e-3)
        assert tree.update.num_tokens < packed.update.num_tokens
    first = reports[0][0].update
    assert (first.loss == pytest.approx(first.metrics["divergence"], rel=1e-5)) == (weight is None)


def test_the_teacher_is_left_as_it_is() -> None:
    before = {name: weight.clone() for name, weight in TEACHER.state_dict().items()}
    loop_of(DistillOptions()).step()
    assert not TEACHER.training
    assert all(torch.equal(weight, before[name]) for name, weight in TEACHER.state_dict().items())
    assert all(weight.grad is None for weight in TEACHER.parameters())


def test_options_that_do_not_fit_the_loop_are_refused_at_its_start() -> None:
    with pytest.raises(ConfigError, match="give both, or neither"):
        loop_of(None)
    with pytest.raises(ConfigError, match="give both, or neither"):
        loop_of(DistillOptions(), None)
    with pytest.raises(InputError, match="share the student's tokenizer"):
        loop_of(DistillOptions(), build(vocab_size=40))
