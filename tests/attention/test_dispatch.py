"""`auto` is `segments` on CPU, and on CUDA the fastest backend that passed its self-check there."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from treering.attention import BACKENDS, AttentionShape, Backend, choose_backend, dispatch
from treering.attention.dispatch import Trial, best_of, trial_of
from treering.errors import ConfigError

CPU = AttentionShape(8, 2, 64, torch.float32, torch.device("cpu"))
SMALL = CPU._replace(num_heads=2, num_key_heads=1, head_size=16)
CUDA = CPU._replace(device=torch.device("cuda"), dtype=torch.bfloat16)

FLEX, TRITON, FLASH = Trial("flex", 2e-3), Trial("triton", 1e-3), Trial("flash", 5e-4)


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_off_cuda_auto_is_segments(device: str) -> None:
    assert choose_backend("auto", CPU._replace(device=torch.device(device))).backend == "segments"


@pytest.mark.parametrize(
    ("seconds", "tried", "chosen"),
    [
        ({"triton": 1.0, "flash": 2.0}, ["triton", "flash"], "triton"),
        ({"triton": 2.0, "flash": 1.0}, ["triton", "flash"], "flash"),
        ({"triton": None, "flash": 1.0}, ["triton", "flash"], "flash"),
        ({"triton": 1.0, "flash": None}, ["triton", "flash"], "triton"),
        ({"triton": None, "flash": None, "flex": 3.0}, ["triton", "flash", "flex"], "flex"),
        ({"triton": None, "flash": None, "flex": None}, ["triton", "flash", "flex"], "segments"),
    ],
)
def test_on_cuda_flex_is_tried_if_no_other_backend_passes(
    seconds: dict[Backend, float | None], tried: list[Backend], chosen: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Backend, AttentionShape]] = []

    def try_backend(backend: Backend, shape: AttentionShape) -> Trial:
        calls.append((backend, shape))
        return Trial(backend, seconds[backend], "is wrong" if seconds[backend] is None else None)

    monkeypatch.setattr("treering.attention.dispatch.trial_of", try_backend)
    assert choose_backend("auto", CUDA).backend == chosen
    assert calls == [(backend, CUDA) for backend in tried]


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


def test_a_trial_is_seconds_of_the_device_for_a_pass_of_several_over_16k_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def run(backend: Backend, *inputs: object) -> Callable[..., torch.Tensor]:
        def attend(query: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
            sizes.append(query.shape[2])
            return query + sum(others).sum()

        return attend

    monkeypatch.setattr(dispatch, "implementation", run)
    monkeypatch.setattr(torch.cuda, "Event", OneMillisecondPerPass)
    monkeypatch.setattr(OneMillisecondPerPass, "passes", sizes)
    assert dispatch._seconds("triton", SMALL) == pytest.approx(1e-3)
    assert set(sizes) == {16_384}
    assert len(sizes) >= 1 + 2 * 2


class OneMillisecondPerPass:
    """Event of a device that takes a millisecond per pass."""

    passes: ClassVar[list[int]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(self.passes)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, stop: "OneMillisecondPerPass") -> float:
        return 1.0 * (stop.at - self.at)


def test_a_trial_times_what_passes_and_names_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_seconds_of_passes", lambda run: run() or 4.0)
    # On CPU segments has a backward, flex has none, and flash refuses the device.
    passed, slower, refused = (trial_of(backend, SMALL) for backend in ("segments", "flex", "flash"))
    assert passed.seconds == 1.0
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
