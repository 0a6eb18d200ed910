"""Tasks whose rewards misbehave."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np

from tests.rl.runs import TinyTask, share_of_even_tokens
from treering.engine.rollout import Rollout
from treering.rl.tasks.task import Prompt


class Slow(TinyTask):
    """One reward of the first step never returns."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if (rollout.draw, rollout.sample) == (0, 2):
            time.sleep(3600)
        return share_of_even_tokens(rollout)


class Deadly(TinyTask):
    """One rollout of each group in the first step always kills the reward worker."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if (rollout.draw, rollout.sample) == (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return share_of_even_tokens(rollout)


class DeadlyOnce(TinyTask):
    """The reward worker dies at the very first reward, and never again."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = Path(marker)

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return share_of_even_tokens(rollout)


class Raising(TinyTask):
    """One rollout of each group has a reward that raises."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        if rollout.sample == 3:
            raise ValueError("no number")
        return share_of_even_tokens(rollout)


class Answering(TinyTask):
    """Observes a token that depends on the turn."""

    def observe(self, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        return np.array([1 + int(rollout.tokens.sum()) % 7], np.int32)


class Constant(TinyTask):
    """All rewards are 1.0, so the weights stay."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        return 1.0


class Starting(TinyTask):
    """Starts a process for each reward, as rewards with their own time limits do."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=queue.put, args=(share_of_even_tokens(rollout),))
        process.start()
        process.join()
        return float(queue.get())
