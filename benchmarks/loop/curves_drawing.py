"""Learning curves as a picture: one HTML file with nothing outside it.

Knows the report's keys, lines and words. Knows nothing of how curves came about.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEFT, _TOP, _WIDTH, _HEIGHT = 54.0, 14.0, 860.0, 360.0
_HUES = (0, 215, 140)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --page: #fff; --ink: #222; --faint: #777; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #16161a; --ink: #ddd; --faint: #999; }} }}
body {{ background: var(--page); color: var(--ink); font: 14px system-ui, sans-serif; margin: 1.5em; }}
svg {{ width: 100%; max-width: 1100px; height: auto; display: block; }}
text {{ fill: var(--ink); font-size: 12px; }} .faint {{ fill: var(--faint); font-size: 11px; }}
.grid {{ stroke: var(--faint); stroke-opacity: .25; }} .band {{ fill-opacity: .15; }}
.line {{ fill: none; stroke-width: 2; }}
</style></head><body>
<h1 style="font-size:1.3em">{title}</h1>
<p>{legend}</p>
{picture}
</body></html>
"""


def draw_curves(report: dict[str, Any]) -> str:
    """The text of an HTML file: a line is the mean over seeds, the band behind it goes from the lowest to the highest.

    Example: `Path("curves.html").write_text(draw_curves(report))`
    """
    sides = [(side["side"]["name"], np.array(side["rewards"], float)) for side in report["sides"]]
    seeds = report["environment"]["seeds"]
    every = np.concatenate([rewards.ravel() for _, rewards in sides])
    low, high = np.floor(every.min() * 10) / 10, np.ceil(every.max() * 10) / 10
    scale = _Scale(num_steps=sides[0][1].shape[1], low=float(low), high=float(max(high, low + 0.1)))
    parts = [*_grid(scale)]
    for number, (name, rewards) in enumerate(sides):
        hue = _HUES[number % len(_HUES)]
        last = report["summary"][name]
        words = f"{name}: {last['first']:.3f} to {last['last']:.3f} +- {last['last_deviation']:.3f}"
        parts += [*_curve(scale, rewards, hue, words), *_label(number, hue, words)]
    size = f"{_LEFT + _WIDTH + 20:.0f} {_TOP + _HEIGHT + 40:.0f}"
    title = "Reward by step"
    legend = (
        f"Means over {len(seeds)} seeds ({', '.join(map(str, seeds))}), bands from the lowest to the highest. The "
        "plain loop packs sequences, drafts nothing and runs in one process; the others train trees, draft and run on "
        "workers, and differ in staleness."
    )
    picture = f'<svg viewBox="0 0 {size}" role="img" aria-label="{title}">\n' + "\n".join(parts) + "\n</svg>"
    return _PAGE.format(title=title, legend=escape(legend), picture=picture)


class _Scale:
    """Places of steps and rewards in the picture."""

    def __init__(self, *, num_steps: int, low: float, high: float) -> None:
        self.num_steps, self.low, self.high = num_steps, low, high

    def x(self, step: float) -> float:
        """Of a step, from 1."""
        return _LEFT + _WIDTH * (step - 1) / max(1, self.num_steps - 1)

    def y(self, reward: float) -> float:
        """Of a reward; higher is further up."""
        return _TOP + _HEIGHT * (self.high - reward) / (self.high - self.low)


def _grid(scale: _Scale) -> Iterator[str]:
    for reward in np.arange(scale.low, scale.high + 1e-9, 0.1):
        y = scale.y(float(reward))
        yield f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="faint" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{reward:.1f}</text>'
    for step in range(1, scale.num_steps + 1, max(1, scale.num_steps // 12)):
        y = _TOP + _HEIGHT + 18
        yield f'<text class="faint" x="{scale.x(step):.1f}" y="{y:.1f}" text-anchor="middle">{step}</text>'
    yield f'<text class="faint" x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">step</text>'


def _curve(scale: _Scale, rewards: NDArray[np.float64], hue: int, words: str) -> Iterator[str]:
    ends = [*_points(scale, rewards.max(0)), *reversed(_points(scale, rewards.min(0)))]
    yield f'<polygon class="band" fill="hsl({hue} 65% 50%)" points="{" ".join(ends)}"/>'
    middle = " ".join(_points(scale, rewards.mean(0)))
    line = f'<polyline class="line" stroke="hsl({hue} 65% 50%)" points="{middle}">'
    yield f"{line}<title>{escape(words)}</title></polyline>"


def _points(scale: _Scale, values: NDArray[np.float64]) -> Sequence[str]:
    return [f"{scale.x(step):.1f},{scale.y(float(value)):.1f}" for step, value in enumerate(values, 1)]


def _label(number: int, hue: int, words: str) -> Iterator[str]:
    y = _TOP + _HEIGHT - 52 + 18 * number
    x = _LEFT + _WIDTH - 300
    yield f'<rect x="{x}" y="{y - 9}" width="22" height="5" fill="hsl({hue} 65% 50%)"/>'
    yield f'<text x="{x + 30}" y="{y}">{escape(words)}</text>'
