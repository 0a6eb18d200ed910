"""Fixtures and settings of all tests: environment variables, hypothesis's profile, and the folder of real data."""

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

# Torch reads this when test modules import it. Threads that spin while they wait make a busy machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may contact a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads this on import, which torch may trigger at any time. Without a GPU, kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomized, so that a test that passes here passes in CI. No deadline, because no test asserts a speed.
settings.register_profile(
    "treering", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("treering")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real trajectories and the tokenizer; skips the test if it is missing."""
    folder = Path(os.environ.get("TREERING_DATA", "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"real data is absent: {folder} is no folder; set TREERING_DATA to one that has it")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TREERING_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turn the run-time type checks off, to test what users see when they pass a wrong type or an unknown option."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the backends' self-checks off: they would refuse a planted fault before the test sees its effect."""
    monkeypatch.setenv("TREERING_SELF_CHECK", "0")
