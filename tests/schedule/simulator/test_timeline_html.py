import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.schedule.timelines import timeline
from treering.schedule.simulator.timeline_html import WIDTH, draw

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


def test_the_page_loads_nothing():
    page = draw([timeline()], title="x")
    for tag, attributes in Page(page).elements:
        assert tag not in ("link", "img", "iframe", "object", "image", "use")
        assert not {"src", "href", "xlink:href"} & attributes.keys()
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
