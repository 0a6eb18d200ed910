"""Writes `docs/settings.md`, every setting of `treering sft` and `treering train`, from their typed sections.

`python tools/settings_page.py` replaces it; `tests/cli/test_settings_help.py` compares it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treering.cli.settings_help import Section, sections_of, split_by_sharing
from treering.config import RlConfig, SftConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """\
# Settings

Look up a key of the TOML files that `treering sft` and `treering train` read. Write a file for your data, and override
keys behind it:

```bash
treering init traces.jsonl --model Qwen/Qwen3-0.6B
treering sft sft.toml optim.learning_rate=1e-5
```

Unknown keys are refused with the nearest name. `treering sft --help` and `treering train --help` show the same lists.
"""


def as_markdown() -> str:
    """The page; `python tools/settings_page.py` writes it."""
    sft, shared = split_by_sharing(sections_of(SftConfig), sections_of(RlConfig))
    train, again = split_by_sharing(sections_of(RlConfig), sections_of(SftConfig))
    groups = {
        "`treering sft`": sft,
        "`treering train`": train,
        "Shared by `sft` and `train`": [_joined(section, again) for section in shared],
    }
    return HEAD + "".join(f"\n## {title}\n{_sections(sections)}" for title, sections in groups.items())


def _joined(section: Section, others: Sequence[Section]) -> Section:
    """A section of `sft` under the headers of both commands, with the defaults of both where they differ."""
    defaults = {one.key: one.default for one in section.settings}
    other = next(each for each in others if {one.key for one in each.settings} == defaults.keys())
    theirs = {one.key: one.default for one in other.settings}
    settings = tuple(
        one
        if theirs[one.key] == one.default
        else replace(one, default=f"{one.default} of sft, {theirs[one.key] or 'unset'} of train")
        for one in section.settings
    )
    name = section.name if section.name == other.name else f"{section.name}] and [{other.name}"
    is_whole = section.type_name == other.type_name
    about = section.description if is_whole else "What both commands have."
    return replace(section, name=name, settings=settings, description=about)


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
