"""How a run of `treering train` shows itself: reward, speed of sampling, and what sharing saves in training.

Knows step reports. Decides nothing; a run is the same without it.
"""

from treering.cli.progress import StepProgress
from treering.engine.protocol import EngineStats
from treering.rl.step_report import RlStepReport, total_stats


class RlProgress:
    """Words for a `StepProgress`.

    Example: after a step it says `reward 0.516 tokens/s 8,120 tokens/forward 1.84 sharing 0.37`.
    """

    def __init__(self, progress: StepProgress) -> None:
        self._progress = progress
        self._engine = EngineStats()
        self._rollout_s = 0.0
        self._num_flat = self._num_unique = 0

    def show(self, report: RlStepReport) -> None:
        """Shows one more step; the reward is the step's, the rest covers this process's steps so far."""
        self._engine = total_stats([self._engine, report.engine])
        self._rollout_s += report.phases.rollout_s
        if report.update is not None:
            self._num_flat += report.update.num_branch_tokens
            self._num_unique += report.update.num_tokens
        self._progress.tell(report.step, self._text(report))

    def _text(self, report: RlStepReport) -> str:
        mean = report.rollouts.reward_mean
        reward = "-" if mean is None else f"{mean:.3f}"
        rate = self._engine.num_sampled / self._rollout_s
        sharing = 1.0 - self._num_unique / self._num_flat if self._num_flat else 0.0
        per_forward = self._engine.tokens_per_forward
        return f"reward {reward} tokens/s {rate:,.0f} tokens/forward {per_forward:.2f} sharing {sharing:.2f}"
