"""Fitted costs: known costs are recovered, the model is left unchanged, and a cost file is for one model only."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import build
from treering.errors import StateError
from treering.train import fit_costs as fitting
from treering.train.fit_costs import cached_costs, fit_costs, fit_seconds, probe_forests
from treering.tree.plan.costs import CostModel

FORESTS = probe_forests(1024, vocab_size=32)


def seconds_of(token_s: float, pair_s: float, segment_s: float, call_s: float) -> list[float]:
    """Counted token by token and path by path."""
    seconds = []
    for forest in FORESTS:
        pairs = sum(position + 1 for position in forest.position.tolist())
        starts = len(set(forest.segment_start.tolist()))
        seconds.append(token_s * len(forest.tokens) + pair_s * pairs + segment_s * starts + call_s)
    return seconds


@pytest.mark.parametrize("costs", [(1e-3, 1e-6, 1e-2), (1e-3, 0.0, 0.0), (0.0, 1e-6, 0.0), (2e-4, 3e-7, 0.0)])
@pytest.mark.parametrize("call_s", [0.0, 0.05])
def test_the_costs_that_made_the_seconds_come_back(costs: tuple[float, float, float], call_s: float) -> None:
    fitted = fit_seconds(FORESTS, seconds_of(*costs, call_s))
    assert (fitted.token_s, fitted.pair_s, fitted.segment_s) == pytest.approx(costs, rel=1e-6, abs=1e-10)


def test_the_best_fit_without_negative_costs_is_found_where_free_least_squares_goes_below_zero() -> None:
    # Seconds that fall with pairs: the free solution has pair_s < 0, and of the others none has a smaller error.
    seconds = np.array(seconds_of(1e-3, 0.0, 0.0, 0.3)) - 4e-7 * np.array([f.position.sum() for f in FORESTS])
    fitted = fit_seconds(FORESTS, seconds.tolist())
    assert fitted.pair_s == 0.0
    rows = [[f.num_tokens, f.num_segments, 1.0] for f in FORESTS]
    scaled = np.array(rows) / seconds[:, None]
    free, *_ = np.linalg.lstsq(scaled, np.ones(len(FORESTS)), rcond=None)
    assert (free >= 0).all()
    assert fitted.token_s == pytest.approx(free[0])


def test_times_that_are_all_alike_still_cost_something() -> None:
    fitted = fit_seconds(FORESTS, [3.0] * len(FORESTS))
    assert max(fitted.token_s, fitted.pair_s, fitted.segment_s) > 0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "NUM_TOKENS", 256)
    monkeypatch.setattr(fitting, "NUM_RUNS", 1)


@pytest.mark.usefixtures("few")
def test_fitting_leaves_the_model_its_gradients_and_random_states_as_they_were() -> None:
    model = build()
    for number, weight in enumerate(model.parameters()):
        weight.grad = torch.full_like(weight, number) if number % 2 else None
    weights = [(weight, weight.clone(), weight.grad) for weight in model.parameters()]
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    costs = fit_costs(model)
    assert costs.token_s + costs.pair_s + costs.segment_s > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    for number, (weight, before, grad) in enumerate(weights):
        assert torch.equal(weight, before)
        assert weight.grad is grad
        assert grad is None or bool((grad == number).all())


def test_gradients_come_back_when_fitting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fitting, "backward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fit_costs(model)
    assert first.grad is not None
    assert bool((first.grad == 1).all())


class Fits:
    """Replaces the timing; counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: nn.Module, **_: object) -> CostModel:
        self.count += 1
        return CostModel(token_s=float(self.count), pair_s=0.1, segment_s=0.0)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    counter = Fits()
    monkeypatch.setattr(fitting, "fit_costs", counter)
    return counter


def test_a_second_call_reads_the_file(fits: Fits, tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    first = cached_costs(build(), path)
    assert cached_costs(build(seed=5), path) == first
    assert json.loads(path.read_text())["costs"] == {"token_s": 1.0, "pair_s": 0.1, "segment_s": 0.0}
    assert fits.count == 1
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("change", ["shape", "heads", "dtype", "frozen", "threads", "backend", "torch", "autocast"])
def test_another_model_or_device_is_fitted_anew(
    fits: Fits, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    cached_costs(build(), path)
    options = {"shape": {"intermediate_size": 64}, "heads": {"num_attention_heads": 8, "head_dim": 4}}
    model = build(**options.get(change, {}))
    if change == "dtype":
        model = model.double()
    if change == "frozen":
        next(model.parameters()).requires_grad_(False)
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    backend = "reference" if change == "backend" else "auto"
    with torch.autocast("cpu", enabled=change == "autocast"):
        again = cached_costs(model, path, backend=backend)
        assert again.token_s == 2.0
        assert cached_costs(model, path, backend=backend) == again
    assert fits.count == 2


COSTS = '{"token_s": 1.0, "pair_s": 1.0, "segment_s": 1.0}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"key": {}, "costs": [1, 2, 3]}',
        '{"key": {}, "costs": {"token_s": 1.0, "pair_s": 1.0}}',
        *(f'{{"key": {{}}, "costs": {COSTS.replace("1.0", bad, 1)}}}' for bad in ("-1.0", '"fast"', "NaN")),
        f'{{"key": {{}}, "costs": {COSTS.replace("pair_s", "bias_s")}}}',
    ],
)
def test_a_corrupt_file_is_refused_by_name(fits: Fits, tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"costs\.json must hold fitted costs.*delete it"):
        cached_costs(build(), path)
    assert path.read_text() == text
