"""Law 7: opening a damaged folder neither fails nor hangs, and reads only rollouts that were added."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.history.store.killed_writer import NUM_PUBLISHES, digest_of, open_store
from tests.killing import ROOT
from treering.history.store import store as store_module
from treering.history.store.history_reader import HistoryReader
from treering.history.store.store import HistoryStore

PROMPTS = ("a", "b", "c", 7)
NUM_TOKENS = 12


def rollout(prompt: int, version: int) -> tuple[int, ...]:
    """Return tokens that identify the prompt and version."""
    return (prompt, version, *range(100 * prompt + version, 100 * prompt + version + NUM_TOKENS))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of several files with obsolete rollouts, and a copy from some publishes earlier."""
    folder = tmp_path_factory.mktemp("history")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_module, "_SLACK_BYTES", 300)
        with HistoryStore(folder / "now", max_bytes=4000, max_epochs=3) as store:
            for version in range(8):
                for prompt in range(4 if version < 5 else 1):
                    store.add(PROMPTS[prompt], [np.array(rollout(prompt, version), np.int32)], version)
                store.publish()
                if version == 3:
                    shutil.copytree(folder / "now", folder / "earlier")
    assert len(list((folder / "now").glob("history-*.bin"))) >= 3
    return folder


def all_read(history: HistoryStore | HistoryReader) -> int:
    """Count the rollouts, and check that each was added."""
    num_rollouts = 0
    for prompt_id, index in history.snapshot.items():
        prompt = PROMPTS.index(prompt_id)
        for version, text in index.texts().items():
            assert text.tolist() == [-1, *rollout(prompt, version)]
            num_rollouts += 1
    return num_rollouts


def put(file: Path, content: bytes, in_place: bool) -> None:
    """Write other bytes into the same file or a new one of its name."""
    if not in_place:
        file.unlink(missing_ok=True)
    file.write_bytes(content)


def damage(folder: Path, earlier: Path, data: st.DataObject, *, in_place: bool) -> None:
    """Damage one file at random."""
    files = sorted(file for file in folder.glob("[!.]*") if file.is_file())
    if not files:
        return
    file, other = (data.draw(st.sampled_from(files), label=label) for label in ("file", "other"))
    kind = data.draw(st.sampled_from(["cut", "flip", "append", "remove", "swap", "copy", "old", "foreign", "folder"]))
    content = file.read_bytes()
    offset = data.draw(st.integers(0, max(len(content) - 1, 0)), label="offset")
    if kind == "cut":
        put(file, content[:offset], in_place)
    elif kind == "flip" and content:
        bit = 1 << data.draw(st.integers(0, 7), label="bit")
        put(file, content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :], in_place)
    elif kind == "append":
        put(file, content + content[:offset], in_place)
    elif kind == "remove":
        file.unlink()
    elif kind == "swap":
        swapped = other.read_bytes()
        put(other, content, in_place)
        put(file, swapped, in_place)
    elif kind == "copy":
        put(
            folder / data.draw(st.sampled_from(["history-00000099.bin", "history-1.bin", "notes.txt"])),
            content,
            in_place,
        )
    elif kind == "old":
        old = data.draw(st.sampled_from(sorted(earlier.glob("[!.]*"))), label="old")
        put(folder / old.name, old.read_bytes(), in_place)
    elif kind == "foreign":
        put(file, data.draw(st.binary(max_size=200), label="foreign"), in_place)
    elif kind == "folder":
        file.unlink()
        file.mkdir()


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_opening_survives_any_damage_and_reads_only_added_rollouts(original: Path, data: st.DataObject) -> None:
    with TemporaryDirectory() as temporary, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        folder = Path(temporary, "now")
        shutil.copytree(original / "now", folder)
        following = HistoryReader(folder)
        is_used = data.draw(st.booleans(), label="is used")
        if is_used:
            all_read(following)
        for _ in range(data.draw(st.integers(1, 3), label="damages")):
            # A reader cannot survive overwriting of a file that it has mapped; nothing in the store does that.
            damage(folder, original / "earlier", data, in_place=not is_used)
        following.refresh()
        all_read(following)
        all_read(HistoryReader(folder))
        with HistoryStore(folder, max_epochs=3) as store:
            assert len(store.snapshot) <= 4
            all_read(store)
            store.add("a", [np.array(rollout(0, 9), np.int32)], 9)
            store.publish()
            assert 9 in store.snapshot["a"].versions
        with HistoryStore(folder, max_epochs=3) as store:
            assert 9 in store.snapshot["a"].versions
            all_read(store)
        following.refresh()
        assert 9 in following.snapshot["a"].versions
        assert all_read(HistoryReader(folder)) >= 1
        for each in warned:
            assert temporary in str(each.message), each.message


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_damaged_save_gives_only_what_was_added(original: Path, data: st.DataObject) -> None:
    with TemporaryDirectory() as temporary, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        folder = Path(temporary, "saved")
        folder.mkdir()
        with shutil_copy(original / "now", Path(temporary, "copy")) as store:
            store.save(folder / "history.bin")
            num_saved = all_read(store)
        damage(folder, original / "earlier", data, in_place=True)
        loaded = HistoryStore.load(folder / "history.bin", max_epochs=3)
        assert all_read(loaded) == num_saved or warned


def shutil_copy(folder: Path, copy: Path) -> HistoryStore:
    shutil.copytree(folder, copy)
    return HistoryStore(copy, max_epochs=3)


def test_a_writer_killed_at_a_file_operation_leaves_one_published_state(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.history.store.killed_writer", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    states = result["digests"]
    assert len(set(states)) == len(states) == NUM_PUBLISHES + 1
    folders = sorted(tmp_path.glob("killed-*"))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in folders:
            state = states.index(digest_of(HistoryReader(folder)))
            with open_store(folder) as store:
                assert states.index(digest_of(store)) == state
            assert not list(folder.glob(".unfinished*"))
            seen.append(state)
    assert seen == sorted(seen)
    assert set(seen) >= set(range(NUM_PUBLISHES))
    assert len(seen) >= result["num_moments"] - 2  # a writer killed before it made its folder leaves none
