import re
from pathlib import Path

import pytest

from tests.cli.hub_cache import save_tokenizer
from tests.cli.runs import Call, metrics_of, weights_of
from tests.cli.sft.test_command import config, write_set
from tests.models import build
from treering.cli.models import find_teacher
from treering.config.model import DistillOptions, ModelConfig
from treering.errors import InputError, StateError

FILES = 'files = ["set.jsonl"]'
DISTILL = ("teacher.path=teacher",)


def of_student(folder: Path) -> Path:
    """Write a run of a small model with the teacher's vocabulary."""
    build("llama", seed=1).save_pretrained(folder / "student")
    path = config(folder, FILES)
    head, shape, rest = re.split(r"(?<=\[model\]\n)(.*?)(?=\n\[)", path.read_text(), maxsplit=1, flags=re.DOTALL)
    assert "num_layers" in shape
    path.write_text(f'{head}path = "student"\ndevice = "cpu"\n{rest}')
    return path


def test_a_run_with_a_teacher_trains_and_resumes(folder: Path, sft: Call) -> None:
    build("llama", seed=2).save_pretrained(folder / "teacher")
    write_set(folder / "set.jsonl", *([1, 2, 3, 4, i] for i in range(8)))
    path = of_student(folder)
    whole, _ = sft(path, *DISTILL, "run.dir=whole")
    assert [step["train/divergence"] > 0 for step in metrics_of(folder / "whole")] == [True] * 4
    assert whole["last_loss"] < whole["first_loss"]
    sft(path, *DISTILL, "run.dir=cut", "train.num_steps=2")
    cut, _ = sft(path, *DISTILL, "run.dir=cut")
    expected = weights_of(whole["checkpoint"])
    assert all(weight.equal(expected[name]) for name, weight in weights_of(cut["checkpoint"]).items())
    with pytest.raises(StateError, match=r"teacher\.divergence"):
        sft(path, *DISTILL, "run.dir=cut", "teacher.divergence=jsd", "train.num_steps=6")


def test_a_teacher_of_another_tokenizer_or_vocabulary_is_refused(
    folder: Path,
    sft: Call,
) -> None:
    saved = save_tokenizer(folder / "teacher", ["a", "b", "c"])
    build("llama").save_pretrained(saved)
    teacher, student = DistillOptions(path=str(saved)), ModelConfig(device="cpu", dtype="bfloat16")
    same, other = (save_tokenizer(folder / name, ["a", *name]) for name in ("bc", "cb"))
    assert find_teacher(teacher, student, Path(), tokenizer=same).dtype.itemsize == 2
    with pytest.raises(InputError, match=r"token 'b' is 1 in .* and 2 in .*2 differ"):
        find_teacher(teacher, student, Path(), tokenizer=other)
    with pytest.raises(InputError, match=r"none is not in .*, or give a hub id such as Qwen/Qwen3-0\.6B"):
        find_teacher(DistillOptions(path=str(folder / "none")), student, Path(), tokenizer=None)
    write_set(folder / "set.jsonl", [1, 2, 3], [1, 2, 4])
    with pytest.raises(InputError, match="share the student's tokenizer"):
        sft(config(folder, FILES), DISTILL[0])
