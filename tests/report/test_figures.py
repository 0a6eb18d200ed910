"""The lines of the page's charts: a run has one colour in all of them, and names are words."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import treering.report

ASSETS = Path(treering.report.__file__).parent / "assets"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


def figures(*runs: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return name, colour and dashes of each chart line of some runs with the same metrics, as in a demo."""
    row = {"step": 1, "train/clip_low": 0.1, "train/clip_high": 0.2, "train/entropy": 0.3, "eval/pass_at_4": 0.5}
    content = {
        "kind": "rl",
        "compared": False,
        "runs": [{"name": name, "rows": [row], "epochs": [], "names": list(row)} for name in runs],
    }
    scripts = [(ASSETS / name).read_text() for name in ("chart.js", "figures.js")]
    data = json.dumps({"textContent": json.dumps(content)})
    code = f"const document = {{ getElementById: () => ({data}) }};\n{scripts[0]}\n{scripts[1]}\n"
    code += "console.log(JSON.stringify(optional().map(({ id, series }) => [id, series.map((each, i) => "
    code += "[each.name, (each.style ?? styleOf(i)).color, (each.style ?? styleOf(i)).dash])])));"
    done = subprocess.run([str(NODE), "-"], input=code, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return {name: [tuple(line) for line in lines] for name, lines in found}


def test_lines_are_named_in_words():
    found = figures("mine")
    assert [name for name, *_ in found["clipped"]] == ["clip low", "clip high"]
    assert [name for name, *_ in found["eval-pass"]] == ["pass@4"]
    assert [name for name, *_ in found["entropy"]] == ["entropy"]
    assert len({color for _, color, _ in found["clipped"]}) == 2


def test_a_run_has_its_colour_in_every_chart():
    found = figures("plain", "treering")
    colors = {name: color for name, color, _ in found["entropy"]}
    assert colors == {"treering": "var(--c0)", "plain": "var(--c1)"}
    for name, color, _ in found["clipped"]:
        assert color == colors[name.partition(",")[0]], name
    assert len({(color, dash) for _, color, dash in found["clipped"]}) == 4
