"""Tinker's own client gets the losses, log-probs and gradients of flat sequences, from single and merged requests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")

import tinker
from tinker import types

from tests.integrations.tinker.serving import ADAM, NAME, client, held, loss_of, serving, wait_until
from tests.models import assert_gradients_equal
from tests.train.loop.test_trainee import data_of, flat, gradients
from treering.serving.tinker.routes import TinkerRoutes
from treering.train.loop.trainee import TargetDatum
from treering.train.target_losses import LOSSES

CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
    "dro": {"beta": 0.3},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerRoutes]]:
    with serving(tmp_path_factory.mktemp("checkpoints"), max_models=64) as opened:
        yield opened


def sent(data: Sequence[TargetDatum]) -> list[tinker.Datum]:
    found = []
    for each in data:
        inputs = {name: types.TensorData.from_torch(values) for name, values in each.inputs.items()}
        inputs["target_tokens"] = types.TensorData.from_numpy(each.targets.astype(np.int64))
        model_input = tinker.ModelInput.from_ints(each.tokens.tolist())
        found.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return found


@pytest.mark.parametrize(("name", "wide"), [*((name, 0) for name in LOSSES), ("cross_entropy", 3)])
def test_a_loss_with_its_config_is_that_of_flat_sequences(
    server: tuple[str, TinkerRoutes], name: Any, wide: int
) -> None:
    url, routes = server
    trained = client(url).create_lora_training_client(base_model=NAME, rank=4).result()
    trainee = routes._held.model(trained.model_id).trainee
    assert trainee is not None
    with torch.no_grad():
        for key, weight in trainee.weights.items():
            if "lora_B" in key:
                weight.copy_(torch.linspace(-0.02, 0.03, weight.numel()).reshape(weight.shape))
    config = CONFIGS[name]
    data = [replace(each, settings={**each.settings, **config}) for each in data_of(name, wide=wide)]
    result = trained.forward_backward(sent(data), name, loss_fn_config=config or None).result()
    own = gradients(trainee)
    logprobs, losses = flat(trainee, name, data)
    total = torch.stack(losses).sum()
    total.backward()
    assert loss_of(result) == pytest.approx(float(total.detach()), rel=1e-9)
    assert_gradients_equal(own, gradients(trainee), 1e-9)
    for output, expected in zip(result.loss_fn_outputs, logprobs, strict=True):
        found = output["logprobs"].to_torch()
        # Answers have float32.
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_waiting_requests_of_a_loss_run_as_one_forest_to_the_same_answers(
    server: tuple[str, TinkerRoutes], name: Any
) -> None:
    url, routes = server
    requests = sent(data_of(name))
    merged, alone = (client(url).create_lora_training_client(base_model=NAME, rank=4).result() for _ in range(2))
    before = routes.stats()["training"]
    with held(routes):
        waiting = [merged.forward_backward([each], name, loss_fn_config=CONFIGS[name] or None) for each in requests]
        update = merged.optim_step(ADAM)
        wait_until(lambda: len(routes._thread._jobs) == len(requests) + 1)
    found = [each.result() for each in waiting]
    update.result()
    after = routes.stats()["training"]
    assert after.pop("processor_s") > before["processor_s"]
    assert {key: after[key] - before[key] for key in after} == {
        "flat_tokens": 20,
        "computed_tokens": 9,
        "requests": len(requests),
        "forests": 1,
    }
    for request, result in zip(requests, found, strict=True):
        own = alone.forward_backward([request], name, loss_fn_config=CONFIGS[name] or None).result()
        assert loss_of(result) == pytest.approx(loss_of(own), rel=1e-12)
        np.testing.assert_allclose(*(each.loss_fn_outputs[0]["logprobs"].data for each in (result, own)), rtol=1e-6)
    alone.optim_step(ADAM).result()
    values = [loss_of(each.forward(requests, name).result()) for each in (merged, alone)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)
