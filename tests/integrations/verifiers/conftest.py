"""An interpreter that has verifiers, for the tests that run it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from treering.rl.environments.chat import BYTES_FOLDER

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of TREERING_VERIFIERS_PYTHON."""
    found = os.environ.get("TREERING_VERIFIERS_PYTHON")
    if found is None or subprocess.run([found, "-c", "import verifiers.v1"], capture_output=True).returncode:
        pytest.skip(f"no verifiers in {found}: make env-test")
    return found


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single bytes with a chat template, so that a random policy mostly samples unusual spellings."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes((BYTES_FOLDER / "tokenizer.json").read_bytes())
    known = json.loads((BYTES_FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def _tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tasksets of these tests importable for the worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "tasksets"))
