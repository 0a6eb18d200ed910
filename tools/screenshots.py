"""Makes the images of the page for the documents, from a short demo: `make screenshots`.

They are those of headless Chromium, which has to be installed.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from treering.cli.report import find_text
from treering.report.content import page_content
from treering.report.page import as_html

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Leaves these cards of a page, and nothing else.
KEEP = """<script>
const kept = KEPT.map(id => document.getElementById(id));
document.querySelector("header").remove();
for (const part of document.querySelectorAll(".tiles, .notes, footer, main > h2")) part.remove();
for (const card of document.querySelectorAll(".card")) if (!kept.includes(card)) card.remove();
for (const part of document.querySelectorAll(".cards")) if (!part.children.length) part.remove();
</script>"""
PHONE = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin:0;background:#8a919a">
<iframe src="page.html" style="display:block;margin:0 auto;width:390px;height:1400px;border:0"></iframe>"""


def main() -> None:
    """Makes a demo, unless the folder of one is given, and its images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, help="folder of a demo; without it a small one is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        demo = options.demo or _make_demo(work / "demo")
        page = as_html(page_content(demo, find_text))
        (work / "page.html").write_text(page, encoding="utf-8")
        (work / "forest.html").write_text(_only(page, "forest", "origins"), encoding="utf-8")
        (work / "phone.html").write_text(PHONE, encoding="utf-8")
        FIGURES.mkdir(exist_ok=True)
        for name, width, height, scheme in (
            ("page", 1200, 1130, "light"),
            ("forest", 1200, 800, "dark"),
            ("phone", 500, 1400, "light"),
        ):
            _shoot(work, work / f"{name}.html", FIGURES / f"report_{name}.png", width, height, scheme)


def _make_demo(folder: Path) -> Path:
    # These import torch.
    from treering.cli.demo import DemoSize, measure

    folder.mkdir()
    size = DemoSize(num_prompts=64, prompts_per_step=16, group_size=12, num_epochs=4)
    measure(folder, size, seed=0, console=Console(stderr=True))
    return folder


def _only(page: str, *ids: str) -> str:
    return page.replace("</body>", KEEP.replace("KEPT", str(list(ids))) + "</body>")


def _shoot(work: Path, page: Path, file: Path, width: int, height: int, scheme: str) -> None:
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"images are made by Chromium, and none of {', '.join(NAMES)} is installed; install it")
    colors = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *colors),
        *(f"--user-data-dir={work / 'profile'}", "--virtual-time-budget=5000"),
        *(f"--window-size={width},{height}", f"--screenshot={file}", page.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
