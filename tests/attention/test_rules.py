"""`auto` takes the first rule that fits the device, dtype and head size, and says why."""

import pytest
import torch

from treering.attention import BACKENDS, choose_backend, rules
from treering.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "has_triton", lambda: True)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "has_triton", lambda: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_cpu_auto_is_segments(dtype: torch.dtype) -> None:
    choice = choose_backend("auto", CPU, dtype=dtype, head_size=128)
    assert choice == ("segments", "auto: the fastest that is exact on CPU, as measured")
    assert choose_backend("auto").backend == "segments"


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(
    ("dtype", "head_size", "backend"),
    [
        (torch.bfloat16, 128, "triton"),
        (torch.bfloat16, 80, "triton"),
        (torch.float16, 256, "triton"),
        (torch.float32, 128, "triton"),
        (torch.float32, 256, "flex"),
        (torch.float64, 64, "segments"),
        (torch.bfloat16, 512, "segments"),
        (torch.float32, 257, "segments"),
    ],
)
def test_on_cuda_auto_takes_kernels_for_what_they_compute(dtype: torch.dtype, head_size: int, backend: str) -> None:
    assert choose_backend("auto", CUDA, dtype=dtype, head_size=head_size).backend == backend


@pytest.mark.usefixtures("with_triton")
def test_no_measurement_is_claimed_for_a_gpu() -> None:
    reasons = [rule.reason for rule in rules.RULES if rule.device == "cuda"]
    assert reasons
    assert all("not yet by a measurement" in reason for reason in reasons)


@pytest.mark.usefixtures("without_triton")
def test_without_triton_cuda_falls_back_to_segments() -> None:
    # FlexAttention is compiled by triton too.
    choice = choose_backend("auto", CUDA, dtype=torch.bfloat16, head_size=128)
    assert choice.backend == "segments"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert choose_backend(name, CUDA) == (name, "as requested")


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match="'flash': choose auto, segments, reference, flex, triton"):
        choose_backend("flash")
