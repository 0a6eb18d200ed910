"""A panel of a running loop: step, reward with a sparkline, speeds, sharing, phases and the time left.

It is made from rows of metrics alone, so that `treering train` shows it of itself and `treering watch` of any run.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from treering import metrics
from treering.report.epochs import phase_seconds
from treering.report.run import number

_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 40
_NUM_RECENT = 8
"""Steps whose mean time predicts the time left."""
_PHASE_WIDTH = 36
_TOTALS = (metrics.STEP_S, metrics.NUM_SAMPLED, metrics.NUM_BRANCH_TOKENS)
_LEAST_SHARE = 0.005
"""Phases below are not named."""
_PHASE_STYLES = {"rollout": "blue", "training": "yellow", "update": "green", "other": "bright_black"}


@dataclass(slots=True, kw_only=True)
class PanelState:
    """What a panel shows of a run.

    Attributes:
        title: of the panel.
        num_steps: of the whole run; None if unknown.
        step: the newest one.
        note: a line of the caller's.
        running: how far the next step is.
    """

    title: str
    num_steps: int | None
    step: int = 0
    note: str = ""
    running: str = ""
    _scores: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SPARKS))
    _score_name: str = "reward"
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    _last: dict[str, float] = field(default_factory=dict)
    _phases: dict[str, float] = field(default_factory=dict)
    _evaluation: tuple[int, dict[str, float]] = field(default_factory=lambda: (0, {}))
    _totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TOTALS, 0.0))

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes the metrics of one more step, with its "step"; step 0 has those of an evaluation alone."""
        self.step = row["step"]
        self.add_evaluation(self.step, row)
        if self.step == 0:
            return
        self._last |= {name: value for name in row if (value := number(row[name])) is not None}
        for name in _TOTALS:
            self._totals[name] += number(row.get(name)) or 0.0
        for phase, seconds in phase_seconds(row).items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        name = metrics.REWARD_MEAN if metrics.NUM_SAMPLED in row else metrics.LOSS
        self._score_name = "reward" if name == metrics.REWARD_MEAN else "loss"
        for values, key in ((self._scores, name), (self._step_s, metrics.STEP_S)):
            value = number(row.get(key))
            if value is not None:
                values.append(value)

    def add_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes the metrics of held-out data, if there are any among those of a step."""
        found = {name: value for name in row if name.startswith("eval/") and (value := number(row[name])) is not None}
        if found:
            self._evaluation = (step, found)

    @property
    def evaluation(self) -> str:
        """The newest measurement on held-out data; empty before the first.

        Example: "eval reward 0.512   pass@1 0.500   pass@4 0.750 after step 20".
        """
        step, values = self._evaluation
        shown = {metrics.EVAL_LOSS: "loss", metrics.EVAL_REWARD: "reward"}
        shown |= {name: name.replace(metrics.EVAL_PASS_AT, "pass@") for name in values if metrics.EVAL_PASS_AT in name}
        parts = [f"{words} {values[name]:.3f}" for name, words in shown.items() if name in values]
        return f"eval {'   '.join(parts)} after step {step}" if parts else ""

    @property
    def has_rows(self) -> bool:
        """Whether any step is known."""
        return bool(self._last)

    @property
    def seconds_left(self) -> float | None:
        """Steps left times the mean of the newest steps; None if unknown."""
        if self.num_steps is None or not self._step_s:
            return None
        return max(0, self.num_steps - self.step) * sum(self._step_s) / len(self._step_s)

    @property
    def score(self) -> str:
        """The newest reward or loss."""
        return f"{self._score_name} {self._scores[-1]:.3f}" if self._scores else f"{self._score_name} -"

    @property
    def past_scores(self) -> list[float]:
        """The newest rewards or losses."""
        return list(self._scores)

    @property
    def figures(self) -> list[str]:
        """Speeds, drafts and sharing of the newest step; those that the run has."""
        speed = self._last.get(metrics.SAMPLED_PER_S, self._last.get(metrics.TOKENS_PER_S))
        accepted = self._last.get(metrics.ACCEPTANCE) if self._last.get(metrics.NUM_DRAFTED) else None
        parts = {
            "tokens/s {:,.0f}": speed,
            "tokens/forward {:.2f}": self._last.get(metrics.TOKENS_PER_FORWARD),
            "drafts accepted {:.0%}": accepted,
            "sharing {:.2f}": self._last.get(metrics.SHARING),
        }
        return [words.format(value) for words, value in parts.items() if value is not None]

    @property
    def totals(self) -> str:
        """Time and tokens of all steps so far."""
        seconds, sampled, trained = (self._totals[name] for name in _TOTALS)
        counts = {"sampled": sampled, "trained": trained}
        tokens = [f"{count:,.0f} tokens {what}" for what, count in counts.items() if count]
        return ", ".join([f"{in_words(seconds)} so far", *tokens])

    @property
    def phases(self) -> dict[str, float]:
        """The share of each phase in the seconds of all steps so far."""
        total = sum(self._phases.values())
        return {phase: seconds / total for phase, seconds in self._phases.items()} if total else {}


def as_panel(state: PanelState) -> Panel:
    """The panel for a terminal."""
    lines: list[Any] = [_progress(state)]
    if state.running:
        # Its symbol turns between two calls, so that a long forward is no standstill.
        lines.append(Spinner("dots", Text(state.running)))
    if state.has_rows or not state.running:
        # With a sparkline of the scores so far.
        scores = f"{state.score}  {sparkline(state.past_scores)}" if state.past_scores else state.score
        lines += [Text(scores), Text("   ".join(state.figures)), Text(state.totals)]
    if state.evaluation:
        lines.append(Text(state.evaluation))
    if state.phases:
        lines.append(_phases(state.phases))
    if state.note:
        lines.append(Text(state.note, style="dim"))
    return Panel(Group(*lines), title=state.title, title_align="left", border_style="blue", expand=False)


def as_line(state: PanelState) -> str:
    """The panel as a plain line.

    Example: "step 12/32 reward 0.829 tokens/s 9,804 tokens/forward 7.05 sharing 0.89, 1 min 12 s so far, 310,412 tokens
    sampled, 401,220 tokens trained, 2 min 0 s left".
    """
    total = "" if state.num_steps is None else f"/{state.num_steps}"
    left = "" if state.seconds_left is None else f", {in_words(state.seconds_left)} left"
    return f"step {state.step}{total} {' '.join([state.score, *state.figures])}, {state.totals}{left}"


def sparkline(values: list[float]) -> str:
    """A block character per value, from the lowest to the highest.

    Example: [0.0, 0.5, 1.0] is "▁▅█".
    """
    low, high = min(values), max(values)
    span = high - low
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[0 if span == 0 else int((value - low) / span * last + 0.5)] for value in values)


def _progress(state: PanelState) -> Table:
    table = Table.grid(padding=(0, 1))
    total = "" if state.num_steps is None else f"/{state.num_steps}"
    left = "" if state.seconds_left is None else f"{in_words(state.seconds_left)} left"
    bar = ProgressBar(total=state.num_steps or 1, completed=min(state.step, state.num_steps or 0), width=28)
    table.add_row(f"step {state.step}{total}", bar, left)
    return table


def _phases(shares: Mapping[str, float]) -> Text:
    text = Text()
    for phase, share in shares.items():
        text.append("█" * round(share * _PHASE_WIDTH), style=_PHASE_STYLES[phase])
    for phase, share in shares.items():
        if share < _LEAST_SHARE:
            continue
        text.append(f"  {phase} {share:.0%}", style=_PHASE_STYLES[phase])
    return text


def in_words(seconds: float) -> str:
    """A duration. Example: 42 is "42 s", 150 is "2 min 30 s", 7,300 is "2 h 1 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
