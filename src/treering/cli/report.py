"""Run `treering report`: write the page of a run, and its rollouts as a table."""

import json
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from treering.cli.display import PlainConsole, note_compiling
from treering.cli.inspect.drafts import rollout_files
from treering.data import Trajectory, data_folder, read_trajectories
from treering.errors import ConfigError, TreeringError, plural
from treering.extras import require
from treering.files.writing import CHECKPOINTS_FOLDER, check_regular, write_file, write_text, writing
from treering.history.draft.kernel import propose
from treering.report.content import TextOf, mean_advantage, page_content
from treering.report.page import as_html
from treering.report.run_data import RunData, is_training, read_runs, section_of

PAGE_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
REFRESH_S = 10
"""Seconds between two pages of a training run."""


def run(
    folders: Sequence[Path],
    out: Path | None,
    *,
    open_page: bool = False,
    refresh: bool = False,
    rollouts: Path | None = None,
    json_output: bool = False,
) -> None:
    """Write the page and print its path; with --open or --refresh, follow a training run to its end.

    With --json print the page's content, and write no page unless `out` names its file.

    Raises:
        ConfigError: several folders with `rollouts`, or a page to open or refresh that is not written.
        InputError: a folder holds no run.
        StateError: a file cannot be written.
    """
    folder, *others = folders
    console = PlainConsole(stderr=True)
    note_compiling(console, propose)
    if rollouts is not None and others:
        raise ConfigError(f"--rollouts writes the rollouts of one run, got {len(folders)} runs; name one")
    if open_page and json_output and out is None:
        raise ConfigError("--open shows a page, but --json writes none; name one with --out, or drop --open or --json")
    if refresh and json_output:
        raise ConfigError("--refresh rewrites the page, but --json prints its content once; drop one of them")
    follows = (open_page or refresh) and not json_output and any(map(is_training, folders))
    content = page_content(folder, find_text, others=others)
    if rollouts is not None:
        num_rollouts = write_parquet(folder, rollouts)
        console.print(f"{plural(num_rollouts, 'rollout is', 'rollouts are')} in {rollouts}")
    if json_output:
        print(json.dumps(content, allow_nan=False))
    if json_output and out is None:
        return
    file = out or (Path(COMPARISON_FILE) if others else folder / PAGE_FILE)
    _write(file, as_html({**content, "refresh_s": REFRESH_S if follows else None}))
    if not json_output:
        print(file, flush=True)
    if open_page:
        webbrowser.open(file.resolve().as_uri())
    if follows:
        console.print("the page follows the run until the run or this command (Ctrl-C) ends")
        _follow(folders, file)


def _follow(folders: Sequence[Path], file: Path) -> None:
    """Rewrite the page until the runs end; the last page no longer reloads itself."""
    follows = True
    while follows:
        try:
            time.sleep(REFRESH_S)
            follows = any(map(is_training, folders))
        except KeyboardInterrupt:
            follows = False
        content = page_content(folders[0], find_text, others=folders[1:])
        _write(file, as_html({**content, "refresh_s": REFRESH_S if follows else None}))


def _write(file: Path, page: str) -> None:
    with writing(file, len(page)):
        check_regular(file)
        write_text(file, page)


def write_parquet(folder: Path, file: Path) -> int:
    """Write a row per rollout, an epoch at a time, and return the number of rows.

    Columns: run, epoch, step, version, prompt_id, reward, advantage, num_tokens, num_sampled, prompt, response, tokens,
    loss_mask, logprobs. The texts are null if the tokenizer is not known.

    Raises:
        InputError: a run has no rollouts, or a damaged file of them.
        MissingExtraError: pyarrow is not installed.
        StateError: the file cannot be written.

    Example: `write_parquet(Path("runs/demo"), Path("rollouts.parquet"))`, then `pandas.read_parquet` of that file.
    """
    require("a Parquet file", "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    integer, number, text = pa.int64(), pa.float64(), pa.string()
    schema = pa.schema(
        [
            *((name, text) for name in ("run", "prompt_id", "prompt", "response")),
            *((name, integer) for name in ("epoch", "step", "version", "num_tokens", "num_sampled")),
            *((name, number) for name in ("reward", "advantage")),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(number)),
        ]
    )
    num_rows = 0

    def fill(draft: Path) -> None:
        nonlocal num_rows
        with parquet.ParquetWriter(draft, schema) as writer:
            for rows in _row_groups(folder):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                num_rows += len(rows)

    with writing(file):
        check_regular(file)
        write_file(file, fill)
    return num_rows


def _row_groups(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for run in read_runs(folder):
        text_of = find_text(run)
        for file in rollout_files(run.folder):
            yield [{"run": run.name, **_row(each, text_of)} for each in read_trajectories(file, may_be_torn=True)]


def _row(each: Trajectory, text_of: TextOf | None) -> dict[str, Any]:
    assert each.tokens is not None, "a run logs tokens"
    tokens = each.tokens.tolist()
    mask = [True] * len(tokens) if each.loss_mask is None else each.loss_mask.tolist()
    start = mask.index(True) if True in mask else len(tokens)
    return {
        "epoch": each.epoch,
        "step": each.step,
        "version": each.version,
        "prompt_id": str(each.task_id),
        "reward": each.reward,
        "advantage": mean_advantage(each),
        "num_tokens": len(tokens),
        "num_sampled": sum(mask),
        "prompt": _text(tokens[:start], text_of),
        "response": _text(tokens[start:], text_of),
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": None if each.logprobs is None else each.logprobs.tolist(),
    }


def _text(tokens: list[int], text_of: TextOf | None) -> str | None:
    return None if text_of is None else "".join(map(text_of, tokens))


_TOKENIZER_FILE = "tokenizer.json"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space before a word."""


def find_text(run: RunData) -> Callable[[int], str] | None:
    """Return a function from a token id to its text; None without a complete tokenizer or `treering[train]`.

    The tokenizer is looked up in the newest checkpoint, then where the settings point.

    Example: a run on sums, in characters, gives "+" for the id of the plus sign.
    """
    folder = _tokenizer_folder(run)
    try:
        if section_of(run.config, "task").get("kind") == "sums":
            from treering.rl.tasks.sums import ChainedSums

            symbols = ChainedSums.symbols
            return lambda token: symbols[token] if token < len(symbols) else f"[{token}]"
        return None if folder is None else _text_of_tokenizer(folder)
    except (ImportError, TreeringError):
        return None


def _text_of_tokenizer(folder: Path) -> Callable[[int], str]:
    from treering.data.rendering.encoder import open_tokenizer

    tokenizer = open_tokenizer(folder)

    def text_of(token: int) -> str:
        # Decoding a single token drops the leading space of these pieces.
        piece, text = str(tokenizer.id_to_token(token) or ""), str(tokenizer.decode([token], skip_special_tokens=False))
        return f" {text.lstrip()}" if piece.startswith(_SPACE) else text or f"[{token}]"

    return text_of


def _tokenizer_folder(run: RunData) -> Path | None:
    checkpoints = sorted((run.folder / CHECKPOINTS_FOLDER).glob(f"*/{_TOKENIZER_FILE}"))
    if checkpoints:
        return checkpoints[-1].parent
    sections = [section_of(run.config, name) for name in ("task", "data", "model")]
    named = [each.get(key) for each in sections for key in ("tokenizer", "path")]
    roots = [Path(), *([] if (data := data_folder()) is None else [data])]
    candidates = [root / name for name in named if isinstance(name, str) for root in roots]
    return next((candidate for candidate in candidates if (candidate / _TOKENIZER_FILE).is_file()), None)
