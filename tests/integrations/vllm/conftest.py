"""Fixtures of the tests of the drafter inside vLLM: one model, and each engine once.

Dropping an engine ends what all engines of the process share, so each stays until the end.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# They do not need vLLM, and import numba, which must not be imported before an LLM starts in the same process.
collect_ignore = [] if find_spec("vllm") is None else ["test_routes.py", "test_weights.py"]


@pytest.fixture(scope="session")
def history_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the drafting engines look for history; missing at first."""
    return tmp_path_factory.mktemp("vllm") / "history"


@pytest.fixture(scope="session")
def without_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings with which each step drafts even without a gain, and history is read on request."""
    file = tmp_path_factory.mktemp("settings") / "drafts.toml"
    file.write_text("min_gain = 0\nrefresh_interval_s = 0\n")
    return file


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose tokens are far from equally likely."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make vllm-test")
    from tests.integrations.vllm.llms import build

    folder = tmp_path_factory.mktemp("model")
    build(tied=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain_llm(model_folder: Path) -> Any:
    """An LLM without drafts, with room for everything."""
    from tests.integrations.vllm.in_process import make_llm

    return make_llm(model_folder)


@pytest.fixture(scope="session")
def draft_settings(history_folder: Path, without_clock: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Return the arguments of a drafting LLM; its history is in `history_folder` and read on request."""
    from tests.integrations.vllm.in_process import drafts

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TREERING_HISTORY", str(history_folder))
        environment.setenv("TREERING_VLLM_CONFIG", str(without_clock))
        yield drafts


@pytest.fixture(scope="session")
def drafting_llm(model_folder: Path, draft_settings: Callable[[], dict[str, Any]]) -> Any:
    """An LLM with drafts and request identity."""
    from tests.integrations.vllm.in_process import make_llm
    from treering.integrations.vllm import register

    register()
    return make_llm(model_folder, **draft_settings(), max_num_seqs=32)


@pytest.fixture(scope="session")
def tight_llm(model_folder: Path, draft_settings: Callable[[], dict[str, Any]]) -> Any:
    """An LLM with drafts and too little memory for its rows, which computes prompts in parts and keeps them."""
    from tests.integrations.vllm.in_process import K, make_llm

    return make_llm(
        model_folder,
        **draft_settings(),
        max_num_seqs=16,
        max_num_batched_tokens=64 + 16 * (K + 1),
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=20,
        disable_log_stats=False,
    )
