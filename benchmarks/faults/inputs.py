"""Inputs that must not be taken for good ones: folders that bring code, records of cut turns, datasets with holes."""

import json
import shutil
from pathlib import Path

import torch

from benchmarks.common.tiny_model import TINY_MODEL
from benchmarks.faults.cases import Case, Kind
from benchmarks.faults.damage import MARKER
from benchmarks.faults.judge import Verdict, failure, judge_refusal, trouble_of
from benchmarks.faults.runs import Ended
from benchmarks.faults.task import save_tokenizer, weights_of

_CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel
Path({marker!r}).touch()
class Config(PreTrainedConfig):
    model_type = "own"
class Model(PreTrainedModel):
    config_class = Config
"""
_SFT = """
[model]{model}[data]
files = ["{files}"]
tokenizer = "{tokenizer}"
template = "plain"
[train]
num_steps = 2
"""
_ANSWERS = ("a b", "b a", "a a b", "b b a")


def _brings_code(case: Case) -> Verdict:
    """A model folder names classes of its own, in a file next to its weights."""
    folder = case.folder / "model"
    shutil.copytree(next((case.task.half / "checkpoints").glob("step-*")), folder)
    config = folder / "config.json"
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "own", "auto_map": names}))
    (folder / "code.py").write_text(_CODE.format(marker=str(case.folder / MARKER)))
    words = ["train", str(case.task.config), f"run.dir={case.run}", f"model.path={folder}", "rl.num_steps=1"]
    return _refused(case.run, case.server.start(words).end())


def _turn_is_cut(case: Case) -> Verdict:
    """One record of four says that its answer was cut: the weights are those of the other three, and it is counted."""
    records = [_record(answer) for answer in _ANSWERS]
    index = case.random.randrange(len(records))
    with_cut = [*records[:index], _record("a b a", finish_reason="length"), *records[index:]]
    ended = _sft(case, case.run, _lines(case.folder / "cut.jsonl", with_cut))
    if (trouble := trouble_of(case.run, ended)) is not None:
        return failure(trouble)
    if ended.code != 0 or "was cut" not in ended.stderr or "(1 of 5 records)" not in ended.stderr:
        return failure(f"exit code {ended.code}, and the cut record is not counted: {ended.stderr[-200:]!r}")
    other = case.folder / "whole"
    plain = _sft(case, other, _lines(case.folder / "whole.jsonl", records))
    left, right = weights_of(case.run, 2), weights_of(other, 2)
    if plain.code != 0 or not left or any(not torch.equal(left[name], right[name]) for name in left):
        return failure("the weights are not those of the records that were not cut")
    return Verdict(ending="counted warning", is_bitwise=True, words=ended.stderr)


def _part_is_missing(case: Case) -> Verdict:
    """A dataset of three parts has two."""
    import pyarrow
    from pyarrow import parquet

    folder = case.folder / "set"
    folder.mkdir()
    missing = case.random.randrange(3)
    for number in {0, 1, 2} - {missing}:
        table = pyarrow.Table.from_pylist([_record(answer) for answer in _ANSWERS])
        parquet.write_table(table, folder / f"train-{number:05d}-of-00003.parquet")
    return _refused(case.run, _sft(case, case.run, folder))


def _refused(run: Path, ended: Ended) -> Verdict:
    if (trouble := trouble_of(run, ended)) is not None:
        return failure(trouble)
    return failure("it trained on this") if ended.code == 0 else judge_refusal(ended)


def _record(answer: str, **fields: str) -> dict[str, object]:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": answer}
    return {"task_id": "t", "messages": [asked, {**said, **fields}]}


def _lines(file: Path, records: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def _sft(case: Case, run: Path, files: Path) -> Ended:
    folder = save_tokenizer(case.folder / "tokenizer", ["a", "b", "user", "assistant"])
    config = case.folder / f"{run.name}.toml"
    config.write_text(_SFT.format(model=TINY_MODEL, files=files, tokenizer=folder))
    return case.server.start(["sft", str(config), f"run.dir={run}"]).end()


INPUTS = (
    Kind(name="a model folder", detail="that brings code", happen=_brings_code),
    Kind(name="a record", detail="whose turn was cut", happen=_turn_is_cut),
    Kind(name="a dataset", detail="with a missing part", happen=_part_is_missing),
)
"""What a run is started on."""
