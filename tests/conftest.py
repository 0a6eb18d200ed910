"""What every test shares: the process environment, hypothesis's profile, and the folder of real data."""

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

# Torch reads it when test modules import it: threads that spin while they wait slow a busy machine down many times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing in the tests may reach for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads it when it is imported, which torch may do at any time: without a GPU kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomized: a test that passes here passes in CI. No deadline: no test asserts a speed.
settings.register_profile(
    "treering", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("treering")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real trajectories and the tokenizer; skips where it is absent."""
    folder = Path(os.environ.get("TREERING_DATA", "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"real data is absent: {folder} is no folder; set TREERING_DATA to one that has it")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests, and the processes that they start, keep tokens in their own folder."""
    os.environ["TREERING_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the run-time type checks off: for what users see when they pass a wrong type or an unknown option."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """For traps planted inside a backend: its self-check would refuse them before a law sees them."""
    monkeypatch.setenv("TREERING_SELF_CHECK", "0")
