"""Draws the figures of docs/ from what the library itself computes, or has measured: `make figures`.

Each figure is one SVG without its own script or font; grey text is readable on light and dark pages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from treering import Drafter, DraftRows, Forest, HistoryStore
from treering.schedule.cluster import Cluster, linear_latency
from treering.schedule.histopipe import make_policy
from treering.schedule.simulator import Timeline, simulate
from treering.schedule.traces import synthetic_trace

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
REAL = ROOT / "benchmarks" / "results" / "real.json"
REHEARSAL = REAL.with_name("rehearsal.json")
BLUE, ORANGE, GREEN, PINK, GREY, TEXT = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#9aa0a6", "#7a8088"
"""Colours that colour-blind readers tell apart (Okabe and Ito)."""

SEQUENCES = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9], [1, 2, 3, 10, 11])
CELL = 26


def draw_tree() -> str:
    """Three sequences as a tree, its packed order, and which token sees which."""
    forest = Forest.from_sequences([np.array(tokens) for tokens in SEQUENCES])
    parts = [_text(0, 14, "Three sequences with shared prefixes are 18 tokens; as a tree they are 11.", bold=True)]
    rows = _row_of_each_token(forest)
    for token in range(forest.num_tokens):
        x, top, bottom = int(forest.position[token]) * 2 * CELL, *rows[token]
        height = (bottom - top + 1) * (CELL + 6) - 6
        colour = BLUE if top != bottom else ORANGE
        parts += [_box(x, 30 + top * (CELL + 6), 2 * CELL - 4, height, colour)]
        parts += [_text(x + CELL - 6, 30 + top * (CELL + 6) + height / 2 + 5, str(forest.tokens[token]), fill="white")]
    below = 30 + len(SEQUENCES) * (CELL + 6) + 34
    parts += [
        _text(0, below - 12, "Packed depth-first, each token once. A filled cell: the row's token sees the column's.")
    ]
    for query in range(forest.num_tokens):
        parts += [_text(6, below + (query + 1.7) * 16, str(forest.tokens[query]), size=11)]
        for key in range(query + 1):
            sees = query < forest.subtree_end[key]
            parts += [_box(30 + key * 16, below + (query + 1) * 16, 14, 14, BLUE if sees else "none", GREY)]
    for key in range(forest.num_tokens):
        parts += [_text(32 + key * 16, below + 10, str(forest.tokens[key]), size=11)]
    return _svg(640, below + (forest.num_tokens + 2) * 16, parts)


def draw_drafts() -> str:
    """A prompt's earlier rollouts, and the draft tree that the drafter makes of them."""
    store = HistoryStore()
    told = ["the sum of 2 and 3 is 5 . now add 4 to get 9 .", "the sum of 2 and 3 is 5 . so answer 9 .",
            "the sum of 2 and 3 is 5 . now add 4 to get 8 ."]  # fmt: skip
    context_text = "the sum of 2 and 3 is"
    ids = {word: number for number, word in enumerate(dict.fromkeys(" ".join(told).split()))}
    names = {number: word for word, number in ids.items()}
    store.add("q", [np.array([ids[word] for word in line.split()], np.int32) for line in told], version=0)
    store.publish()
    context = [ids[word] for word in context_text.split()]
    count = lambda *values: np.array(values, np.int64)  # noqa: E731
    rows = DraftRows(
        prompt_ids=["q"], groups=count(0), tokens=np.array([context], np.int32), num_tokens=count(len(context)),
        num_prompt_tokens=count(0), max_drafts=count(12),
    )  # fmt: skip
    drafts = Drafter(store).propose(rows)
    parts = [_text(0, 14, "Earlier rollouts of a prompt", bold=True)]
    parts += [_text(0, 36 + 20 * number, line, mono=True) for number, line in enumerate(told)]
    below = 36 + 20 * len(told) + 30
    parts += [_text(0, below - 8, "draft the next one as a tree; numbers: estimated acceptance", bold=True)]
    parts += [_text(0, below + 16, context_text, mono=True)]
    left, points = 8.4 * len(context_text) + 16, dict[int, tuple[float, int]]()
    num_lines = 0
    for node, (token, parent) in enumerate(zip(drafts.tokens.tolist(), drafts.parents.tolist(), strict=True)):
        follows = parent == node - 1
        x, line = points.get(parent, (left, 0))
        if not follows and node:
            num_lines += 1
            line = num_lines
        word = names[token]
        width = 8.4 * len(word) + 12
        parts += [_box(x, below + 34 * line, width, 22, ORANGE if line else BLUE)]
        parts += [_text(x + 6, below + 16 + 34 * line, word, fill="white", mono=True)]
        parts += [_text(x, below + 32 + 34 * line, f"{drafts.acceptance[node]:.2f}", size=9)]
        points[node] = (x + width + 6, line)
    return _svg(640, below + 34 * (num_lines + 1) + 12, parts)


def draw_pipeline() -> str:
    """Two schedules of the same rollouts on the same workers: in order, and HistoPipe's."""
    trace = synthetic_trace("lognormal:8.0,1.1,40000", num_steps=4, num_rollouts=64, noise=0.2, seed=3)
    latency = linear_latency(step_s=0.02, row_s=0.0005)
    cluster = Cluster(num_workers=6, num_slots=16, max_tokens=40000, staleness=1, latency=latency)
    runs = {name: simulate(make_policy(name), trace, workers=cluster) for name in ("fifo", "histopipe")}
    longest = max(run.makespan_s for run in runs.values())
    parts, top = (
        [_text(0, 14, "The same rollouts of four steps on six workers; a gap is an idle worker.", bold=True)],
        30,
    )
    for name, run in runs.items():
        words = f"{name}: {run.makespan_s:,.0f} s, {run.bubble:.0%} of the workers' time idle"
        parts += [_text(0, top + 14, words)]
        parts += _bars(run, top + 22, 620 / longest)
        top += 22 + 6 * 18 + 24
    return _svg(640, top, parts)


def _bars(run: Timeline, top: float, scale: float) -> Iterator[str]:
    colours = (BLUE, ORANGE, GREEN, "#cc79a7")
    for worker, step, start, end in zip(run.workers, run.steps, run.started_s, run.ended_s, strict=True):
        yield _box(start * scale, top + int(worker) * 18, max(1.0, (end - start) * scale), 15, colours[(step - 1) % 4])


def draw_learning() -> str:
    """Rewards by step of both loops on each task, means over seeds."""
    found = json.loads(REAL.read_text(encoding="utf-8"))
    runs = found["runs"]
    parts = [_text(0, 14, "SmolLM2-135M-Instruct, mean reward by step: plain loop and Treering", bold=True)]
    tasks = list(dict.fromkeys(run["task"] for run in runs if run["temperature"] == 1.0))
    for number, task in enumerate(tasks):
        own = [run["sides"] for run in runs if (run["task"], run["temperature"]) == (task, 1.0)]
        lines = {side: np.mean([each[side]["reward_by_step"] for each in own], 0) for side in ("plain", "treering")}
        parts += _chart(task, lines, {"plain": ORANGE, "treering": BLUE}, left=number * 215, ends=_steps(lines))
    hour = {"treering": found["hour"]["reward_by_step"]}
    parts += _chart("sums, an hour", hour, {"treering": BLUE}, left=len(tasks) * 215, ends=_steps(hour))
    return _svg(215 * (len(tasks) + 1), 230, parts)


def draw_forwards() -> str:
    """Tokens per forward and rollout by epoch when drafts come from one source, and from all."""
    tasks = json.loads(REAL.read_text(encoding="utf-8"))["tasks"]
    colours = {"siblings": GREEN, "history": ORANGE, "own": GREY, "others": PINK, "all": BLUE}
    parts = [_text(0, 14, "Tokens per verification step by epoch and source of drafts", bold=True)]
    for number, row in enumerate(tasks):
        lines = {source: row["drafts_by_source"][source] for source in colours}
        title = f"{row['task']}, temperature {row['temperature']:g}"
        parts += _chart(title, lines, colours, left=number * 215, ends=("epoch 1", str(len(lines["all"]))), low=1.0)
    return _svg(215 * len(tasks), 230, parts)


def draw_kept() -> str:
    """Share of rehearsed tokens that later weights keep, by the number of updates in between."""
    cells = json.loads(REHEARSAL.read_text(encoding="utf-8"))["change"]
    colours = dict(zip((_name_of(cell) for cell in cells), (ORANGE, PINK, GREY, GREEN, BLUE), strict=True))
    parts = [_text(0, 14, "SmolLM2-135M-Instruct: tokens kept after 1, 2, 4 and 8 updates", bold=True)]
    for number, temperature in enumerate(("1", "0.7")):
        kept = [[each["kept_share"] for each in cell["updates_apart"][temperature].values()] for cell in cells]
        lines = dict(zip(colours, kept, strict=True))
        title = f"temperature {temperature}"
        parts += _chart(title, lines, colours, left=number * 215, ends=("1 update", "8"))
    return _svg(640, 230, parts)


def _name_of(cell: Mapping[str, Any]) -> str:
    return f"{'LoRA' if cell['trained'] == 'lora' else 'all'} {cell['rate']:.0e}".replace("e-0", "e-")


def _steps(lines: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    return "step 1", str(len(next(iter(lines.values()))))


def _chart(
    title: str,
    lines: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    *,
    left: float,
    ends: tuple[str, str],
    low: float = 0.0,
) -> Iterator[str]:
    """Lines over steps or epochs in a frame of 150 by 130, with the first and last of each axis, and a legend."""
    high = max(max(values) for values in lines.values())
    count, top, width, height = len(next(iter(lines.values()))), 50, 165, 120
    yield _text(left + 30, 38, title)
    yield _box(left + 30, top, width, height, "none", GREY)
    for value, y in ((high, top + 10), (low, top + height)):
        yield _text(left, y, f"{value:.2f}", size=11)
    yield _text(left + 30, top + height + 14, ends[0], size=11)
    yield _text(left + width + 10, top + height + 14, ends[1], size=11)
    along, up = width / max(1, count - 1), height / (high - low)
    for number, (name, values) in enumerate(lines.items()):
        points = [
            f"{left + 30 + along * i:.1f},{top + height - up * (each - low):.1f}" for i, each in enumerate(values)
        ]
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{colours[name]}" stroke-width="1.8"/>'
        yield _text(
            left + 30 + (number % 3) * 62, top + height + 30 + number // 3 * 14, name, fill=colours[name], size=11
        )


def _row_of_each_token(forest: Forest) -> list[tuple[int, int]]:
    """First and last branch through each token; branches that share one are neighbours here."""
    through: list[list[int]] = [[] for _ in range(forest.num_tokens)]
    for branch in range(forest.num_branches):
        for token in forest.path(branch).tolist():
            through[token].append(branch)
    return [(min(branches), max(branches)) for branches in through]


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="3" fill="{fill}" stroke="{stroke}" stroke-width="0.5"/>'


def _text(
    x: float, y: float, words: str, *, fill: str = TEXT, size: int = 13, bold: bool = False, mono: bool = False
) -> str:
    family = "ui-monospace, monospace" if mono else "system-ui, sans-serif"
    weight = ' font-weight="600"' if bold else ""
    style = f'font-family="{family}" font-size="{size}" fill="{fill}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _svg(width: float, height: float, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


FIGURES: dict[str, Callable[[], str]] = {
    "tree.svg": draw_tree,
    "drafts.svg": draw_drafts,
    "pipeline.svg": draw_pipeline,
    "real_learning.svg": draw_learning,
    "real_drafts.svg": draw_forwards,
    "rehearsal_kept.svg": draw_kept,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)
