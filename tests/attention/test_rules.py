"""`auto` is `segments` on CPU, and on CUDA the fastest backend that has passed its self-check there."""

import pytest
import torch

from treering.attention import BACKENDS, AttentionShape, Backend, choose_backend
from treering.attention.rules import CUDA_CANDIDATES, Trial, best_of, trial_of
from treering.errors import ConfigError

CPU = AttentionShape(8, 2, 64, torch.float32, torch.device("cpu"))
SMALL = CPU._replace(num_heads=2, num_key_heads=1, head_size=16)
CUDA = CPU._replace(device=torch.device("cuda"), dtype=torch.bfloat16)

FLEX, TRITON, FLASH = Trial("flex", 2e-3), Trial("triton", 1e-3), Trial("flash", 5e-4)


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_off_cuda_auto_is_segments(device: str) -> None:
    assert choose_backend("auto", CPU._replace(device=torch.device(device))).backend == "segments"


def test_on_cuda_every_candidate_is_tried_on_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Backend, AttentionShape]] = []

    def try_backend(backend: Backend, shape: AttentionShape) -> Trial:
        tried.append((backend, shape))
        return Trial(backend, {"flex": 3.0, "triton": 1.0, "flash": 2.0}[backend])

    monkeypatch.setattr("treering.attention.rules.trial_of", try_backend)
    assert choose_backend("auto", CUDA).backend == "triton"
    assert tried == [(backend, CUDA) for backend in CUDA_CANDIDATES]


@pytest.mark.parametrize(
    ("trials", "fastest", "repeatable"),
    [
        ([FLEX, TRITON, FLASH], "flash", "triton"),
        ([Trial("flex", 1e-3), Trial("triton", 2e-3)], "flex", "triton"),
        ([FLEX, TRITON, Trial("flash", None, "not installed")], "triton", "triton"),
        ([FLEX, Trial("triton", None, "is off by 1e-2"), FLASH], "flash", "flex"),
        ([FLASH], "flash", "segments"),
        ([Trial("flex", None, "no compiler"), Trial("triton", None, "no triton")], "segments", "segments"),
    ],
)
def test_the_fastest_that_passed_is_chosen_and_in_deterministic_mode_no_time_counts(
    trials: list[Trial], fastest: str, repeatable: str
) -> None:
    assert best_of(trials, is_deterministic=False).backend == fastest
    assert best_of(trials, is_deterministic=True).backend == repeatable


def test_the_reason_has_the_times_and_every_refusal() -> None:
    choice = best_of([FLEX, TRITON, Trial("flash", None, "not installed")], is_deterministic=False)
    assert choice.reason == "auto: fastest of triton 1.00 ms, flex 2.00 ms; flash: not installed"


def test_a_trial_times_what_passes_and_names_what_does_not() -> None:
    # On CPU segments has a backward, flex has none, and flash refuses the device.
    passed, slower, refused = (trial_of(backend, SMALL) for backend in ("segments", "flex", "flash"))
    assert passed.seconds is not None
    assert passed.seconds > 0
    assert slower.refusal is not None
    assert "no backward on CPU" in slower.refusal
    assert refused.refusal is not None
    assert "runs on Hopper and Blackwell" in refused.refusal


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert choose_backend(name, CUDA) == (name, "as requested")


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match="'cudnn': choose auto, segments, reference, flex, triton, flash"):
        choose_backend("cudnn", CPU)
