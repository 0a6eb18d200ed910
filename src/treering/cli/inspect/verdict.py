"""The end of `treering inspect`: how much trees can gain on each file and why, and the command to run next."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from treering.cli.inspect.file_report import FileReport
from treering.cli.inspect.tables import stem_of

WORTH = 1.1
"""The speedup from which trees pay; steps reach about 0.9 of the bound."""
_NEARLY_ALL = 0.95


def verdict(report: FileReport, model_shape: str) -> str:
    """What trees can gain on a file at most, and why, in a sentence or two; then what its rewards say.

    Example: two trajectories of 100 tokens that begin with the same 80 share 40% of their tokens.
    """
    because = _why_much(report) if report.flop_bound >= WORTH else _why_little(report)
    gain = f"{stem_of(report)}: trees can train it at most {report.flop_bound:.2f}x as fast ({model_shape}), because"
    return " ".join([gain, because, *_about_rewards(report)])


def picture_line(report: FileReport, model_shape: str) -> str:
    """How many pictures a file has, and what trees gain with the vision tower counted.

    Example: 16 rows after the same picture of 256 tokens are 16 pictures, 1 computed.
    """
    found = report.pictures
    assert found is not None, "the file has pictures"
    counts = (
        f"{stem_of(report)}: {found.pictures:,} pictures of {found.distinct_in_file:,} kinds, of which trees compute "
        f"{found.distinct:,}; they are {found.tokens:,} of its tokens, {found.unique_tokens:,} with sharing"
    )
    if found.flop_bound is None:
        return f"{counts}; the vision tower is not counted, as no config.json beside the tokenizer says its sizes."
    return (
        f"{counts}. With the vision tower trees can train it at most {found.flop_bound:.2f}x as fast ({model_shape})."
    )


def next_command(reports: Sequence[FileReport], tokenizer: str | None, *, has_causes: bool) -> str:
    """What to run after the reports: a configuration where it pays, else the search for what keeps sharing away.

    Args:
        reports: of the files, in order.
        tokenizer: as the user named it.
        has_causes: whether the search is done.
    """
    best = max(reports, key=lambda report: report.flop_bound)
    if best.flop_bound >= WORTH:
        return f"treering init {shlex.quote(best.file)} --model {_model_of(tokenizer)}"
    files = " ".join(shlex.quote(report.file) for report in reports)
    with_tokenizer = "" if tokenizer is None else f" --tokenizer {shlex.quote(tokenizer)}"
    return f"treering inspect {files}{with_tokenizer} {'--drafts' if has_causes else '--why'}"


def _why_much(report: FileReport) -> str:
    share = f"{report.sharing:.0%} of its tokens are the beginning of another trajectory of their task too"
    if report.prompt_only_bound >= _NEARLY_ALL * report.token_bound:
        return f"{share}, nearly all of them in prompts."
    return f"{share}; sharing prompts alone would give {report.prompt_only_bound:.2f}x by tokens."


def _why_little(report: FileReport) -> str:
    if report.tasks < report.trajectories:
        return f"only {report.sharing:.1%} of its tokens are the beginning of another trajectory of their task too."
    alone = f"each of its {report.trajectories:,} trajectories is a task of its own, and a task is one tree"
    if report.whole_set.flop_bound < WORTH:
        return f"{alone}."
    return (
        f"{alone}; as one task they would give {report.whole_set.flop_bound:.2f}x: give those that begin alike one "
        "task_id."
    )


def _about_rewards(report: FileReport) -> Iterator[str]:
    if report.rewards and report.rewards.equal_groups:
        equal, groups = report.rewards.equal_groups, report.rewards.groups
        yield (
            f"In {equal:,} of {groups:,} tasks all rewards are the same, so that advantages relative to the group are "
            "0 there."
        )


def _model_of(tokenizer: str | None) -> str:
    is_alone = tokenizer is not None and Path(tokenizer).is_dir() and not (Path(tokenizer) / "config.json").is_file()
    return "MODEL" if tokenizer is None or is_alone else shlex.quote(tokenizer)
