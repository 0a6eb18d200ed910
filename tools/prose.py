"""Check docstrings, comments and pages for openings and phrases that read as translated.

`python tools/prose.py` prints file, line, what was found and what to write instead; `--counts` prints one number for
each fault.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools", "docs")
# Rooms whose prose is still to be rewritten. Remove a line when its room is clean; add none.
PENDING = ()
OPENINGS = {
    "Of": "begin with the subject or a verb",
    "Those": "name what they are",
    "Whose": "begin with the subject or a verb",
    "Which": "begin with the subject or a verb",
    "As": "begin with the subject or a verb",
}
PHRASES = {
    r"so (many|much)(?! (as|that|so|faster|slower)\b)": "write the number, or 'that many'",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|different|one\b|\w+er\b|more|less)": "write 'is not a'",
    r"\b(is|are|be) (said|told)\b": "write 'is logged' or 'is reported'",
    r"\banew\b": "write 'again'",
    r"\bbeside(?!s)\b": "write 'next to' or 'with'",
    r"\b(without a word|in words)\b": "write 'silently' or 'as text'",
    r"\b(a|an) \w+ of (its|their) own(?! \w+\b[.,;])": "write 'its own' before the noun",
    r"\ba one\b": "write the noun",
    r"\bpictures?\b": "write 'image'",
    r"\bfates?\b": "write 'outcome'",
    r"\bwhat (is|are) (no|not)\b": "name the thing",
}


def pieces(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text and whether it is a docstring of every piece of prose in a file."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = re.compile(r"^ *```.*?^ *```", re.M | re.S).sub(lambda found: "\n" * found[0].count("\n"), text)
        line = 1
        for block in re.split(r"(\n\s*\n)", fenced):
            if block.strip():
                yield line, re.sub(r"`[^`]*`", "``", block.lstrip("#>-* \n|")), False
            line += block.count("\n")
        return
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, re.sub(r"`[^`]*`|>>>.*", "``", value.value), True
    lines: list[str] = []
    last = 0
    for token in [*tokenize.generate_tokens(io.StringIO(text).readline)]:
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != last + 1:
                yield last - len(lines) + 1, " ".join(lines), False
                lines = []
            lines.append(re.sub(r"`[^`]*`", "``", token.string.lstrip("# ")))
            last = token.start[0]
    if lines:
        yield last - len(lines) + 1, " ".join(lines), False


def faults(text: str, *, is_docstring: bool) -> Iterator[tuple[str, str]]:
    """Yield what is found in a piece and what to write instead."""
    if is_docstring and re.fullmatch(r"See ``\.?[^.]*\.?", text.strip()):
        yield "See", "delete the docstring, or say what it does"
    for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", text.strip()):
        opening = sentence.split(" ", 1)[0]
        if opening in OPENINGS and not re.match(r"As (a|an|soon|long|many|in|the|with|of|usual|for)\b", sentence):
            yield sentence[:60], OPENINGS[opening]
    for pattern, fix in PHRASES.items():
        for found in re.finditer(pattern, text):
            yield found[0], fix


def main() -> int:
    """Print the faults; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="one number for each fault")
    options = parser.parse_args()
    files = [ROOT / "README.md", *sorted(f for name in FOLDERS for f in (ROOT / name).rglob("*") if f.is_file())]
    counts: Counter[str] = Counter()
    num_pieces = 0
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".md") or path == Path(__file__):
            continue
        for line, text, is_docstring in pieces(path):
            num_pieces += 1
            for found, fix in faults(text, is_docstring=is_docstring):
                counts[fix] += 1
                if not options.counts:
                    print(f"{name}:{line}: {found!r}: {fix}")
    if options.counts:
        for fix, count in counts.most_common():
            print(f"{count:6,} {fix}")
        print(f"{num_pieces:6,} pieces")
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main())
