"""Hugging Face loads checkpoints, they restore bitwise, and a damaged one is never used."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models import build
from tests.train.loop.runs import IDENTITY, assert_bitwise_equal, store, tensors_of, tiny_loop, tiny_tasks
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.errors import StateError, UnsupportedError
from treering.files.writing import MANIFEST, read_facts, write_folder
from treering.metrics import METRICS_FILE
from treering.train.loop.checkpoint import STATE_FILE, checkpoint_path, set_random_state
from treering.train.loop.saved_run import open_run
from treering.train.loop.sft_loop import SftLoop

WEIGHTS = "model.safetensors"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_loads_a_checkpoint_as_the_model_that_was_trained(tmp_path: Path, tied: bool) -> None:
    loop = tiny_loop(build(tie_word_embeddings=tied))
    loop.step()
    loaded = AutoModelForCausalLM.from_pretrained(store(tmp_path).save(loop))
    assert type(loaded) is type(loop.model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_bitwise_equal(loaded.state_dict(), loop.model.state_dict())


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_weights_moments_and_random_state_come_back_bit_by_bit(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    loop = tiny_loop(build(tie_word_embeddings=tied).to(dtype))
    for _ in range(3):
        loop.step()
    store(tmp_path).save(loop)
    saved = tensors_of(loop)
    other = tiny_loop(build(seed=1, tie_word_embeddings=tied).to(dtype))
    torch.manual_seed(99)
    assert store(tmp_path).restore_newest(other) == other.num_steps_done == 3
    assert_bitwise_equal(tensors_of(other), saved)
    loop.step(), other.step()
    assert_bitwise_equal(tensors_of(other), tensors_of(loop))


@pytest.mark.parametrize(("num_saved", "num_here"), [(4, 2), (2, 4), (0, 2)])
def test_random_states_of_devices_come_back_where_another_machine_has_them(
    num_saved: int, num_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_here)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: int(state)}))
    set_random_state({"cpu": torch.get_rng_state(), "cuda": [torch.tensor(10 + i) for i in range(num_saved)]})
    assert restored == {i: 10 + i for i in range(min(num_saved, num_here))}


def test_the_newest_checkpoints_are_kept_and_folders_of_the_user_untouched(tmp_path: Path) -> None:
    loop, checkpoints = tiny_loop(), store(tmp_path, keep=2)
    (tmp_path / "step-notes").mkdir()
    for _ in range(3):
        loop.step()
        assert checkpoints.save(loop) == checkpoint_path(tmp_path, loop.num_steps_done)
        if loop.num_steps_done == 1:
            shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001-best")
    assert names_in(tmp_path) == ["step-000001-best", "step-000002", "step-000003", "step-notes"]
    assert checkpoints.restore_newest(tiny_loop()) == 3


def test_tokenizer_files_are_copied_next_to_the_weights(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "notes.txt").write_text("private")
    saved = store(tmp_path / "checkpoints", tokenizer=tokenizer).save(tiny_loop())
    expected = {"config.json", "generation_config.json", MANIFEST, WEIGHTS, "tokenizer.json", STATE_FILE}
    assert set(names_in(saved)) == expected


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (WEIGHTS, flip_a_bit),
        (STATE_FILE, cut_short),
        ("config.json", Path.unlink),
        (MANIFEST, flip_a_bit),
        (MANIFEST, Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_once_and_the_one_before_is_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    loop = tiny_loop()
    loop.step()
    store(tmp_path).save(loop)
    saved = tensors_of(loop)
    loop.step()
    damage(store(tmp_path).save(loop) / file)
    other = tiny_loop(build(seed=1))
    # In the manifest a flipped bit may hit a checksum or a name; either way the folder contradicts itself.
    with pytest.warns(UserWarning, match=r"skipped damaged checkpoints: step-000002: .*; using step-000001") as caught:
        assert store(tmp_path).restore_newest(other) == 1
    assert len(caught) == 1
    assert file in str(caught[0].message) or file == MANIFEST
    assert_bitwise_equal(tensors_of(other), saved)


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again_and_later_ones_go(tmp_path: Path) -> None:
    loop = tiny_loop()
    for _ in range(3):
        loop.step()
        store(tmp_path, keep=3).save(loop)
    for step in (2, 3):
        cut_short(checkpoint_path(tmp_path, step) / WEIGHTS)
    again = tiny_loop()
    with pytest.warns(UserWarning, match=r"step-000003: .*step-000002: .*using step-000001"):
        store(tmp_path).restore_newest(again)
    again.step()
    store(tmp_path, keep=1).save(again)
    assert names_in(tmp_path) == ["step-000002"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store(tmp_path).restore_newest(tiny_loop()) == 2


def test_without_a_whole_checkpoint_resuming_is_refused(tmp_path: Path) -> None:
    loop = tiny_loop()
    cut_short(store(tmp_path).save(loop) / WEIGHTS)
    before = tensors_of(loop)
    with pytest.raises(StateError, match=r"all are damaged \(step-000000: model.safetensors has changed"):
        store(tmp_path).restore_newest(loop)
    assert_bitwise_equal(tensors_of(loop), before)


def test_a_checkpoint_of_another_run_is_refused_with_every_differing_key(tmp_path: Path) -> None:
    store(tmp_path).save(tiny_loop())
    other = store(tmp_path, identity=IDENTITY | {"train.seed": 1, "train.layout": "packed"})
    message = "train.layout is 'nothing' there and 'packed' here; train.seed is 0 there and 1 here; set these back"
    with pytest.raises(StateError, match=message) as caught:
        other.restore_newest(tiny_loop())
    assert "hidden_size" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"hidden_size": 16}, {"num_hidden_layers": 3}])
def test_weights_of_another_model_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    store(tmp_path).save(tiny_loop())
    with pytest.raises(StateError, match="resume with the model that was saved"):
        store(tmp_path).restore_newest(tiny_loop(build(**changes)))


def test_a_model_that_hugging_face_could_not_load_again_is_refused(tmp_path: Path) -> None:
    loop = tiny_loop()
    loop.model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="and this is Linear; merge adapters"):
        store(tmp_path).save(loop)
    assert names_in(tmp_path) == []


def test_leftovers_of_a_kill_are_ignored_and_cleared(tmp_path: Path) -> None:
    whole = store(tmp_path).save(tiny_loop())
    shutil.copytree(whole, tmp_path / ".unfinished-step-000007")
    assert store(tmp_path).restore_newest(tiny_loop()) == 0
    loop = tiny_loop()
    loop.step()
    store(tmp_path).save(loop)
    assert names_in(tmp_path) == ["step-000000", "step-000001"]


def test_a_changed_manifest_does_not_make_another_run(tmp_path: Path) -> None:
    facts = {"step": 7, "identity": {"rl.seed": 0, "model": "a"}}
    write_folder(tmp_path / "a", lambda draft: (draft / "x").touch(), facts)
    whole = (tmp_path / "a" / MANIFEST).read_bytes()
    for offset in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 7
        (tmp_path / "a" / MANIFEST).write_bytes(changed)
        with suppress(StateError):
            assert read_facts(tmp_path / "a") == facts


def test_a_folder_keeps_its_facts_and_files_in_folders(tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "inner").mkdir()
        (draft / "inner" / "a.bin").write_bytes(b"abc")

    write_folder(tmp_path / "whole", fill, {"list": [1, "x"]})
    assert read_facts(tmp_path / "whole") == {"list": [1, "x"]}
    manifest = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    # The standard's own example gives the SHA-256 of "abc".
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["files"] == {"inner/a.bin": {"num_bytes": 3, "sha256": digest}}
    cut_short(tmp_path / "whole" / "inner" / "a.bin")
    with pytest.raises(StateError, match=r"whole: inner/a\.bin has changed"):
        read_facts(tmp_path / "whole")


def test_opening_a_run_makes_its_folder_once_and_refuses_other_settings(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert store(folder / "checkpoints").restore_newest(tiny_loop()) is None
    first, second = (open_run(folder, tiny_loop(), store(folder / "checkpoints")) for _ in range(2))
    assert (first.is_new, first.step, first.resume_step) == (True, 0, None)
    # A run killed before its first checkpoint starts over.
    assert (second.is_new, second.step, second.resume_step) == (False, 0, 0)
    (folder / METRICS_FILE).write_text('{"step": 1}\n')
    other = store(folder / "checkpoints", identity=IDENTITY | {"data": "files"})
    with pytest.raises(StateError, match="data is 'generated' there and 'files' here"):
        open_run(folder, tiny_loop(), other)


def test_a_run_that_ended_before_its_first_step_may_start_with_other_settings(tmp_path: Path) -> None:
    open_run(tmp_path, tiny_loop(), store(tmp_path / "checkpoints"))
    (tmp_path / METRICS_FILE).touch()
    other = store(tmp_path / "checkpoints", identity=IDENTITY | {"data": "files"})
    loop = tiny_loop()
    assert open_run(tmp_path, loop, other).resume_step == 0
    loop.step()
    other.save(loop)
    with pytest.raises(StateError, match="data is 'files' there and 'generated' here"):
        open_run(tmp_path, tiny_loop(), store(tmp_path / "checkpoints"))


def test_a_folder_with_foreign_metrics_is_refused_every_time(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    for _ in range(2):
        with pytest.raises(StateError, match=r"metrics.jsonl holds rows of another run"):
            open_run(tmp_path, tiny_loop(), store(tmp_path / "checkpoints"))
    with pytest.raises(StateError, match=r"metrics.* cannot be written .*move it away, and start again"):
        open_run(tmp_path / METRICS_FILE / "run", tiny_loop(), store(tmp_path / "none"))
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1}\n'


class Hinting(SftLoop):
    """Loop whose hints are its step number as text."""

    hint: str | None = None

    def save_hints(self, file: Path) -> None:
        file.write_text(str(self.num_steps_done))

    def load_hints(self, file: Path) -> None:
        self.hint = file.read_text() if file.exists() else "lost"


def hinting_loop() -> Hinting:
    options = SftOptions(trees_per_step=2)
    return Hinting(build(), tiny_tasks(), optim=OptimOptions(learning_rate=1e-2), options=options)


def test_hints_lie_apart_one_file_per_checkpoint_that_is_kept(tmp_path: Path) -> None:
    checkpoints = store(tmp_path / "checkpoints", keep=2, hints=tmp_path / "hints")
    loop = hinting_loop()
    (tmp_path / "hints").mkdir()
    (tmp_path / "hints" / "notes").write_text("mine")
    (tmp_path / "hints" / ".unfinished-step-000001").write_text("half")
    for _ in range(3):
        loop.step()
        checkpoints.save(loop)
    assert names_in(tmp_path / "hints") == ["notes", "step-000002", "step-000003"]
    other = hinting_loop()
    checkpoints.restore_newest(other)
    assert (other.num_steps_done, other.hint) == (3, "3")
    # A kill between the two writes leaves hints without a checkpoint, and lost hints do no harm.
    (tmp_path / "hints" / "step-000009").write_text("9")
    (tmp_path / "hints" / "step-000003").unlink()
    checkpoints.restore_newest(other)
    assert (other.num_steps_done, other.hint) == (3, "lost")
    assert names_in(tmp_path / "hints") == ["notes", "step-000002"]
