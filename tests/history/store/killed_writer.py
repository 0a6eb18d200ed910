"""Publish in a folder and get killed at each file operation in turn; see `tests.killing`.

Leaves a folder for every kill and prints the digest of every published state.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from tests.killing import in_a_process
from treering.history.store import store as store_module
from treering.history.store.history_reader import HistoryReader
from treering.history.store.store import HistoryStore

NUM_PUBLISHES = 5


def digest_of(history: HistoryStore | HistoryReader) -> str:
    """Return a digest of a snapshot, order included."""
    digest = hashlib.blake2b()
    for prompt_id, index in history.snapshot.items():
        digest.update(repr((prompt_id, index.versions.tolist())).encode())
        for array in (index.text, index.order):
            digest.update(array.tobytes())
    return digest.hexdigest()


def open_store(folder: Path) -> HistoryStore:
    """Open a store whose budget evicts prompts and whose files are merged now and then."""
    store_module._SLACK_BYTES = 400
    return HistoryStore(folder, max_bytes=1500)


def publish(folder: Path) -> list[str]:
    """Publish repeatedly and return the digest of each state, the empty one first."""
    rng = np.random.default_rng(0)
    with open_store(folder) as store:
        digests = [digest_of(store)]
        for version in range(NUM_PUBLISHES):
            for prompt_id in ("a", f"q{version}", f"q{version % 3}"):
                store.add(prompt_id, [rng.integers(0, 9, 25).astype(np.int32)], version)
            store.publish()
            digests.append(digest_of(store))
    return digests


def main(folder: Path) -> None:
    """Let one writer finish, and kill one at each file operation."""
    assert in_a_process(lambda path: json.dumps(publish(path)), folder / "whole", None)
    done = json.loads((folder / "whole.json").read_text())
    moments = range(1, done["num_operations"] + 1)
    for moment in moments:
        assert not in_a_process(lambda path: json.dumps(publish(path)), folder / f"killed-{moment:03d}", moment)
    print(json.dumps({"digests": json.loads(done["digest"]), "num_moments": len(moments)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
