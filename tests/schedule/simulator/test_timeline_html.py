import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.schedule.timelines import timeline
from treering.errors import InputError
from treering.schedule.simulator.timeline_html import MAX_ROWS, WIDTH, draw

SVG = re.compile(r"<svg.*</svg>", re.DOTALL)


class Page(HTMLParser):
    """Every element's name and attributes."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def bars(page):
    """Rectangles of steps: tooltip, left and right edge, top edge, colour."""
    root = ElementTree.fromstring(SVG.search(page).group())
    found = []
    for shape in root.iter("rect"):
        if "data-step" in shape.attrib:
            left = float(shape.get("x"))
            edges = (left, left + float(shape.get("width")), float(shape.get("y")))
            found.append((shape.find("title").text, *edges, shape.get("fill")))
    return found


def test_a_bar_is_where_its_time_is_on_an_axis_common_to_all():
    page = draw([timeline("slow", span_s=40.0), timeline("fast", span_s=15.0)], title="two")
    scale = WIDTH / 90.0
    found = {}
    for words, left, right, top, _ in bars(page):
        found.setdefault(words, []).append((left, right, top))
    [(left, right, _)] = found["worker 1, step 2: 45 s to 85 s, 1,234 rollouts"]
    origin = left - 45 * scale
    assert right - left == pytest.approx(40 * scale, abs=0.1)
    [(left, right, _)] = found["worker 0, step 2: 20 s to 27.5 s, 1,234 rollouts"]
    assert (left, right) == (pytest.approx(origin + 20 * scale, abs=0.1), pytest.approx(origin + 27.5 * scale, abs=0.1))
    [(left, right, _)] = found["training, step 1: 40 s to 45 s"]
    assert (left, right) == (pytest.approx(origin + 40 * scale, abs=0.1), pytest.approx(origin + 45 * scale, abs=0.1))


def test_training_waits_for_the_update_before():
    late = replace(timeline(training_s=5.0), sampled_s=np.array([40.0, 42.0]), trained_s=np.array([45.0, 50.0]))
    words = [words for words, *_ in bars(draw([late], title="x")) if words.startswith("training")]
    assert words == ["training, step 1: 40 s to 45 s", "training, step 2: 45 s to 50 s"]


def test_every_step_has_one_colour_in_all_policies_and_neighbours_differ():
    page = draw([timeline("a", num_steps=5), timeline("b", num_steps=5)], title="x")
    colours = {}
    for words, *_, colour in bars(page):
        colours.setdefault(re.search(r"step (\d+)", words).group(1), set()).add(colour)
    assert [len(colours[step]) for step in "12345"] == [1] * 5
    assert len(set.union(*colours.values())) == 5


def test_figures_stand_above_each_policy_with_speedups_over_the_first():
    page = draw([timeline("slow & steady", span_s=40.0), timeline("fast", span_s=15.0, bound_s=30.0)], title="<x>")
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(SVG.search(page).group()).iter("text")]
    # Two workers of which one runs half as long: idle for 1/4 of the steps, and through the first update.
    assert "slow & steady 90 s, 1.00x, 67% of the bound, bubble 29%" in texts
    assert "fast 40 s, 2.25x, 75% of the bound, bubble 36%" in texts
    assert "<title>&lt;x&gt;</title>" in page


def test_of_many_workers_an_even_sample_is_drawn_and_it_says_so():
    page = draw([timeline(num_workers=1000, num_steps=1)], title="x")
    workers = [int(re.match(r"worker (\d+)", words).group(1)) for words, *_ in bars(page) if words.startswith("worker")]
    assert len(workers) == MAX_ROWS
    assert (workers[0], workers[-1]) == (0, 999)
    gaps = {after - before for before, after in pairwise(workers)}
    assert gaps <= {15, 16}
    assert f"Of 1,000 workers {MAX_ROWS} are drawn" in page
    assert "are drawn" not in draw([timeline(num_workers=MAX_ROWS)], title="x")


def test_the_page_loads_nothing():
    page = draw([timeline()], title="x")
    for tag, attributes in Page(page).elements:
        assert tag not in ("link", "img", "iframe", "object", "image", "use")
        assert not {"src", "href", "xlink:href"} & attributes.keys()
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_no_timeline_is_refused():
    with pytest.raises(InputError, match="at least one timeline"):
        draw([], title="x")
