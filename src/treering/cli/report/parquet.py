"""Writes the rollouts of a run as one Parquet file, for whoever wants to browse them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treering.cli.inspect.rollouts import rollout_files
from treering.cli.report.texts import find_text
from treering.data import Trajectory, read_trajectories
from treering.extras import require
from treering.files.atomic import write_file
from treering.files.writing import check_regular, writing
from treering.report.content import TextOf
from treering.report.forest import mean_advantage
from treering.report.run import read_runs


def write_parquet(folder: Path, file: Path) -> int:
    """Writes a row per rollout, an epoch at a time, and returns their number.

    Columns: run, epoch, step, version, prompt_id, reward, advantage, num_tokens, num_sampled, prompt, response, tokens,
    loss_mask, logprobs. The texts are null where the tokenizer is not known.

    Raises:
        InputError: a run has no rollouts, or a damaged file of them.
        MissingExtraError: pyarrow is not installed.
        StateError: the file cannot be written.

    Example: `write_parquet(Path("runs/demo"), Path("rollouts.parquet"))`, then `pandas.read_parquet` of that file.
    """
    require("a Parquet file", "pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    schema = _schema(pa)
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


def _schema(pa: Any) -> Any:
    integer, number, text = pa.int64(), pa.float64(), pa.string()
    return pa.schema(
        [
            *((name, text) for name in ("run", "prompt_id", "prompt", "response")),
            *((name, integer) for name in ("epoch", "step", "version", "num_tokens", "num_sampled")),
            *((name, number) for name in ("reward", "advantage")),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(number)),
        ]
    )


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
