"""Draws timelines as one self-contained HTML file.

W workers, of which at most `MAX_ROWS` are drawn
"""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.simulator.timeline import Timeline

MAX_ROWS = 64
"""Most workers drawn per policy; of more, an even sample."""

WIDTH = 1100.0
"""Width of the longest timeline in SVG units."""
_LEFT, _RIGHT = 76.0, 24.0
_HEAD, _GAP, _AXIS = 22.0, 18.0, 30.0
_ROWS_HEIGHT, _MAX_ROW = 256.0, 16.0
_TRAINING = 10.0
_MAX_TICKS = 12
# Degrees of hue per step, the golden angle: steps that are close in time get different colours.
_HUE_TURN = 137.508

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #222; --faint: #777; --idle: #e9e9ee; --end: #c00; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #16161a; --ink: #ddd; --faint: #999; --idle: #2a2a31; --end: #f66; }} }}
body {{ background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; margin: 1.5em; }}
svg {{ width: 100%; max-width: 1500px; height: auto; display: block; }}
text {{ fill: var(--ink); font-size: 12px; }} .faint {{ fill: var(--faint); font-size: 11px; }}
.idle {{ fill: var(--idle); }} .grid {{ stroke: var(--faint); stroke-opacity: .25; }}
.end {{ stroke: var(--end); stroke-width: 1.5; }} .bound {{ stroke: var(--ink); stroke-dasharray: 4 3; }}
.dim rect[data-step] {{ opacity: .15; }} .dim rect.lit {{ opacity: 1; }}
</style></head><body>
<h1 style="font-size:1.3em">{title}</h1>
<p>{legend}</p>
{picture}
<script>
const picture = document.querySelector("svg");
picture.addEventListener("mouseover", event => {{
  const step = event.target.dataset.step;
  picture.classList.toggle("dim", step !== undefined);
  for (const lit of picture.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (step !== undefined)
    for (const part of picture.querySelectorAll(`[data-step="${{step}}"]`)) part.classList.add("lit");
}});
picture.addEventListener("mouseleave", () => picture.classList.remove("dim"));
</script>
</body></html>
"""


def draw(timelines: Sequence[Timeline], *, title: str) -> str:
    """Draws the timelines above each other on one time axis, as the text of an HTML file.

    Each row is a worker and each colour a step; gaps are idle time. The last row shows the updates. A solid line marks
    the end of the last update, a dashed one the lower bound. Hovering over a bar shows its numbers and highlights its
    step. The file is self-contained and follows the light or dark setting of the browser.

    Args:
        timelines: one or more; speedups are over the first.
        title: title of the page.

    Raises:
        InputError: no timeline.

    Example: `Path("pipe.html").write_text(draw([synchronous, histopipe], title="What HistoPipe gains"))`
    """
    if not timelines:
        raise InputError("draw needs at least one timeline, got none; simulate a policy")
    total_s = max(timeline.makespan_s for timeline in timelines)
    scale = WIDTH / total_s
    panels: list[_Panel] = []
    for timeline in timelines:
        top = panels[-1].bottom + _GAP if panels else 0.0
        panels.append(_Panel(timeline, timelines[0], scale, top))
    bottom = panels[-1].bottom
    parts = [*_axis(total_s, scale, bottom), *(part for panel in panels for part in panel.parts())]
    size = f"{_LEFT + WIDTH + _RIGHT:.0f} {bottom + _AXIS:.0f}"
    picture = f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>"
    return _PAGE.format(title=escape(title), legend=_legend(timelines), picture=picture)


class _Panel:
    """One timeline with its position in the picture."""

    def __init__(self, timeline: Timeline, first: Timeline, scale: float, top: float) -> None:
        self._timeline = timeline
        self._speedup = first.makespan_s / timeline.makespan_s
        self._scale = scale
        self._top = top
        self._rows = _drawn_workers(timeline.num_workers)
        self._height = min(_MAX_ROW, _ROWS_HEIGHT / self._rows.size)
        self._training_top = top + _HEAD + self._height * self._rows.size + 2.0
        self.bottom = self._training_top + _TRAINING

    def parts(self) -> list[str]:
        """SVG elements, background first."""
        return [*self._frame(), *self._spans(), *self._updates(), *self._lines()]

    def _frame(self) -> Iterator[str]:
        timeline, top = self._timeline, self._top + _HEAD
        figures = (
            f"{_seconds(timeline.makespan_s)}, {self._speedup:.2f}x, {timeline.throughput_of_bound:.0%} of the bound, "
            f"bubble {timeline.bubble:.0%}"
        )
        yield (
            f'<text x="{_LEFT:g}" y="{self._top + 15:.1f}"><tspan font-weight="bold">{escape(timeline.policy)}</tspan>'
            f" {figures}</text>"
        )
        # Each background ends with its own policy, which makes end times easy to compare.
        width = timeline.makespan_s * self._scale
        yield _rect(_LEFT, top, width, self._height * self._rows.size, 'class="idle"')
        yield _rect(_LEFT, self._training_top, width, _TRAINING, 'class="idle"')
        middle = top + self._height * self._rows.size / 2
        yield f'<text class="faint" x="{_LEFT - 6:g}" y="{middle + 4:.1f}" text-anchor="end">workers</text>'
        yield f'<text class="faint" x="{_LEFT - 6:g}" y="{self.bottom - 1:.1f}" text-anchor="end">training</text>'

    def _spans(self) -> Iterator[str]:
        timeline = self._timeline
        row_of = np.full(timeline.num_workers, -1)
        row_of[self._rows] = np.arange(self._rows.size)
        rows = row_of[timeline.workers]
        thickness = self._height * (0.85 if self._height > 3 else 1.0)
        for at in np.flatnonzero(rows >= 0):
            start, end, step = timeline.started_s[at], timeline.ended_s[at], int(timeline.steps[at])
            words = (
                f"worker {timeline.workers[at]}, step {step}: {_seconds(start)} to {_seconds(end)}, "
                f"{timeline.num_rollouts[at]:,} rollouts"
            )
            top = self._top + _HEAD + rows[at] * self._height
            yield self._bar(start, end, top, thickness, step, words)

    def _updates(self) -> Iterator[str]:
        ended = self._timeline.trained_s
        started = np.maximum(self._timeline.sampled_s, np.concatenate([[0.0], ended[:-1]]))
        for step, (start, end) in enumerate(zip(started, ended, strict=True), 1):
            words = f"training, step {step}: {_seconds(start)} to {_seconds(end)}"
            yield self._bar(start, end, self._training_top, _TRAINING, step, words)

    def _bar(self, start: float, end: float, top: float, height: float, step: int, words: str) -> str:
        fill = f'fill="hsl({step * _HUE_TURN % 360:.0f} 60% 55%)" data-step="{step}"'
        return _rect(_LEFT + start * self._scale, top, (end - start) * self._scale, height, fill, words)

    def _lines(self) -> Iterator[str]:
        for kind, time_s in (("end", self._timeline.makespan_s), ("bound", self._timeline.bound_s)):
            x = _LEFT + time_s * self._scale
            ends = f'y1="{self._top + _HEAD:.1f}" y2="{self.bottom:.1f}"'
            yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>'


def _drawn_workers(num_workers: int) -> NDArray[np.int64]:
    if num_workers <= MAX_ROWS:
        return np.arange(num_workers)
    return np.rint(np.linspace(0, num_workers - 1, MAX_ROWS)).astype(np.int64)


def _legend(timelines: Sequence[Timeline]) -> str:
    most = max(timeline.num_workers for timeline in timelines)
    sampled = f" Of {most:,} workers {MAX_ROWS} are drawn, an even sample." if most > MAX_ROWS else ""
    return (
        "Each row is a worker and each colour a step. A bar lasts from the first token of the worker's share of the "
        "step to the last one; near its end few rollouts may be running. Gaps are idle time. "
        "Solid line: the end of the last update. Dashed line: the lower bound. Speedups are over "
        f"{escape(timelines[0].policy)}.{sampled}"
    )


def _axis(total_s: float, scale: float, top: float) -> Iterator[str]:
    step_s = _tick_s(total_s)
    for number in range(int(total_s / step_s) + 1):
        x = _LEFT + number * step_s * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{top + 6:.1f}"/>'
        label = f'<text class="faint" x="{x:.1f}" y="{top + 20:.1f}" text-anchor="middle">'
        yield f"{label}{_seconds(number * step_s)}</text>"


def _tick_s(total_s: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... seconds, or of their fractions, that gives few enough ticks."""
    power = 10.0 ** np.floor(np.log10(total_s / _MAX_TICKS))
    return next(float(power * times) for times in (1, 2, 5, 10) if power * times >= total_s / _MAX_TICKS)


def _seconds(time_s: float) -> str:
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.3g} s"


def _rect(x: float, y: float, width: float, height: float, rest: str, words: str = "") -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" {rest}'
    return f"{shape}><title>{escape(words)}</title></rect>" if words else f"{shape}/>"
