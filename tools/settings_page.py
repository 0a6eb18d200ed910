"""Writes `docs/settings.md`, every setting of `treering sft` and `treering train`, from their typed sections.

`python tools/settings_page.py` replaces it; `tests/cli/reference/test_settings.py` compares it.
"""

from collections.abc import Sequence
from pathlib import Path

from treering.cli.reference.settings import Section, sections_of
from treering.config import RlConfig, SftConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """\
# Settings

`treering sft CONFIG` and `treering train CONFIG` read a TOML file with these sections. `treering init FILE --model
MODEL` writes one for your data, and every key can be given behind the file too: `treering sft run.toml
train.num_steps=20`.
Unknown keys are refused with the nearest name. `treering sft --help` and `treering train --help` show the same lists.
"""


def as_markdown() -> str:
    """The page; `python tools/settings_page.py` writes it."""
    of_sft, of_rl = sections_of(SftConfig), sections_of(RlConfig)
    shared = {section.type_name for section in of_sft} & {section.type_name for section in of_rl}
    groups = {
        "`treering sft`": [section for section in of_sft if section.type_name not in shared],
        "`treering train`": [section for section in of_rl if section.type_name not in shared],
        "Both": [section for section in of_sft if section.type_name in shared],
    }
    return HEAD + "".join(f"\n## {title}\n{_sections(sections)}" for title, sections in groups.items())


def _sections(sections: Sequence[Section]) -> str:
    return "".join(f"\n### {section.title}\n\n{section.description}\n\n{_table(section)}" for section in sections)


def _table(section: Section) -> str:
    lines = ["| key | default | values | what it sets |", "|---|---|---|---|"]
    for one in section.settings:
        default = "" if one.default is None else f"`{one.default}`"
        cells = [f"`{one.key}`", default, one.kind, one.description]
        assert not any("|" in cell for cell in cells), f"a cell ends at a bar: {cells}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(as_markdown(), encoding="utf-8")
