"""Hooks of mkdocs.yml: READMEs join the site, links say titles, every page is there as Markdown, llms.txt lists all."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = sorted([*ROOT.glob("examples/*/README.md"), ROOT / "benchmarks" / "README.md"])
_OUT = re.compile(r"\]\((?:\.\./)+(examples|benchmarks)/")
_IN = re.compile(r"\]\((?:\.\./)+docs/")
# A page by its file name, which is its best name in the repository alone.
_BY_FILE = re.compile(r"\[([\w/.]+\.md)\]\(((?:\.\./)*([\w/]+\.md)(?:#[\w-]+)?)\)")
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the READMEs of examples and benchmarks."""
    for path in OUTSIDE:
        name = str(path.relative_to(ROOT))
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Points links between the repository's folders to pages of the site; other files of the repository lose theirs.

    A link whose text is the name of its file gets the title of that page.
    """
    titles = dict(_titles(config.nav)) | {str(path.relative_to(ROOT)): _heading(path) for path in OUTSIDE}
    depth = page.file.src_uri.count("/")
    up = "../" * depth
    found = _IN.sub(f"]({up}", markdown) if depth else markdown
    found = _OUT.sub(rf"]({up}\1/", found)
    found = _BY_FILE.sub(lambda link: f"[{titles.get(link[3], link[1])}]({link[2]})", found)
    if depth:
        # Files next to an example are part of the repository alone.
        return re.sub(r"\[([^\]]+)\]\((?!\w+:|#|\.\./)(?!README\.md)[^)]*\)", r"\1", found)
    return _ELSEWHERE.sub(r"\1", found)


def _heading(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """File and title of each page of the navigation."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from _titles(inside)


def on_post_build(*, config: Any) -> None:
    """Copies every page as Markdown next to its HTML, and writes llms.txt."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    pages = [(path, path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").glob("*.md"))]
    for path, name in [*pages, *((path, path.relative_to(ROOT)) for path in OUTSIDE)]:
        text = path.read_text(encoding="utf-8")
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        title, _, rest = text.partition("\n")
        first = next((block for block in rest.split("\n\n") if block.strip() and block.strip()[0] not in "#`|<!["), "")
        lines.append(f"- [{title.lstrip('# ')}]({name}): {' '.join(first.split())[:200]}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
