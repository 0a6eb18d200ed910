"""Build recordings from lists, for tests that measure them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treering.analysis.recording import Outline, Recorded, record
from treering.data import Renderer, Trajectory


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rollout; `mask` covers the response and defaults to all sampled."""

    task: str = "q"
    epoch: int = 0
    step: int | None = None
    prompt: tuple[int, ...] = (90, 91)
    response: tuple[int, ...] = ()
    mask: tuple[bool, ...] | None = None
    reward: float | None = None

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        return self.mask or (True,) * len(self.response)


def trajectories(lines: Sequence[Line]) -> list[Trajectory]:
    return [
        Trajectory(
            task_id=line.task,
            tokens=np.array(line.prompt + line.response, np.int32),
            loss_mask=np.array((False,) * len(line.prompt) + line.is_sampled),
            epoch=line.epoch,
            step=line.step,
            reward=line.reward,
        )
        for line in lines
    ]


def recording(*lines: Line, choose: Callable[[Outline], Outline] = lambda whole: whole) -> Recorded:
    found = trajectories(lines)
    return record(found, Renderer(tokenizer=None).render(found), choose=choose)
