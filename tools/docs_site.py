"""Hooks of mkdocs.yml: READMEs join the site, every page is there as Markdown too, and llms.txt lists them."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = sorted([*ROOT.glob("examples/*/README.md"), ROOT / "benchmarks" / "README.md"])
_OUT = re.compile(r"\]\((?:\.\./)+(examples|benchmarks)/")
_IN = re.compile(r"\]\((?:\.\./)+docs/")
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the READMEs of examples and benchmarks."""
    for path in OUTSIDE:
        name = str(path.relative_to(ROOT))
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links between the repository's folders to pages of the site; other files of the repository lose theirs."""
    depth = page.file.src_uri.count("/")
    up = "../" * depth
    found = _IN.sub(f"]({up}", markdown) if depth else markdown
    found = _OUT.sub(rf"]({up}\1/", found)
    if depth:
        # Files beside an example are part of the repository alone.
        return re.sub(r"\[([^\]]+)\]\((?!\w+:|#|\.\./)(?!README\.md)[^)]*\)", r"\1", found)
    return _ELSEWHERE.sub(r"\1", found)


def on_post_build(*, config: Any) -> None:
    """Copies every page as Markdown beside its HTML, and writes llms.txt."""
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
