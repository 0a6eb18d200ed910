"""Tinker's own client trains and samples here as its protocol specifies."""

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")

import tinker
from tinker import types

from tests.integrations.tinker.serving import (
    ADAM,
    EOS,
    NAME,
    NUM_POSITIONS,
    PROMPT,
    ask,
    batch,
    client,
    datum,
    loss_of,
    serving,
)
from treering.serving.tinker.routes import TinkerRoutes
from treering.serving.tinker.training_thread import Job

NO_PATH = f"tinker://{'0' * 32}:train:0/weights/x"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerRoutes]]:
    with serving(tmp_path_factory.mktemp("checkpoints"), max_sessions=512, max_models=512) as opened:
        yield opened


@pytest.fixture(scope="module")
def service(server: tuple[str, TinkerRoutes]) -> tinker.ServiceClient:
    return client(server[0])


def test_training_lowers_the_loss_and_changes_what_is_sampled(service: tinker.ServiceClient) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=0).result()
    info = trained.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (NAME, True, 4)
    losses = []
    for _ in range(8):
        forward = trained.forward_backward(batch(), "cross_entropy")
        update = trained.optim_step(ADAM)
        losses.append(loss_of(forward.result()))
        metrics = update.result().metrics
        assert (metrics["treering/flat_tokens"], metrics["treering/computed_tokens"]) == (9.0, 5.0)
    assert losses[-1] < 0.5 * losses[0]
    before = service.create_sampling_client(base_model=NAME).result()
    after = trained.save_weights_and_get_sampling_client().result()
    tokens = tinker.ModelInput.from_ints([*PROMPT, 1, 4])
    scored = [float(sum(each.compute_logprobs(tokens).result()[4:])) for each in (before, after)]
    assert scored[1] > scored[0] + 1
    (output, _) = trained.forward(batch(), "cross_entropy").result().loss_fn_outputs
    np.testing.assert_allclose(after.compute_logprobs(tokens).result()[4:], output["logprobs"].data[3:], rtol=1e-6)


def test_samples_have_the_log_probs_that_training_computes(service: tinker.ServiceClient) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    trained.forward_backward(batch(), "cross_entropy")
    trained.optim_step(ADAM).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, stop=[EOS])
    answer = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 3, params).result()
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 3
    for sequence in answer.sequences:
        whole = [*PROMPT, *sequence.tokens]
        (output,) = trained.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs
        np.testing.assert_allclose(output["logprobs"].data[len(PROMPT) - 1 :], sequence.logprobs, rtol=2e-6)
        assert sequence.stop_reason == ("stop" if sequence.tokens[-1] == EOS else "length")


def test_equal_seeds_give_equal_samples_and_none_gives_others(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = tinker.ModelInput.from_ints(PROMPT)

    def sample(**given: Any) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=8, stop=[], **given)
        return [each.tokens for each in sampler.sample(prompt, 2, params).result().sequences]

    assert sample(seed=3) == sample(seed=3) != sample(seed=4)
    assert sample() != sample()
    assert sample(temperature=0.0)[0] == sample(temperature=0.0)[1]
    assert all(len(tokens) == 8 for tokens in sample())


def test_prompt_log_probs_of_tokens_targets_and_the_likeliest(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt, params = tinker.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1)
    matrix = torch.tensor([[5, -1, -1, -1], [-1, 7, 9, -1], [2, 8, -1, -1]])
    targets = [types.TensorData.from_torch(matrix), types.TensorData.from_torch_sparse(matrix, pad_value=-1)]
    found = []
    for target in targets:
        answer = sampler.sample(
            prompt,
            1,
            params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
            target_prompt_logprobs=target,
        ).result()
        logprobs = answer.prompt_logprobs
        assert logprobs[0] is None
        assert answer.topk_prompt_logprobs[0] is None
        assert all(len(row) == 3 and row[0][1] >= row[1][1] for row in answer.topk_prompt_logprobs[1:])
        own = answer.target_prompt_logprobs.to_torch().numpy()
        found.append(own)
        np.testing.assert_allclose([own[0, 0], own[1, 1], own[2, 0]], logprobs[1:], rtol=1e-6)
        assert own[0, 1] == 0.0
        (sequence,) = answer.sequences
        best = dict(sequence.topk_logprobs[0])
        assert max(best.values()) == sequence.topk_logprobs[0][0][1] >= sequence.logprobs[0] - 1e-6
    np.testing.assert_array_equal(*found)
    last = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=1).result()
    assert last.prompt_logprobs[:3] == [None] * 3
    assert last.prompt_logprobs[3] == pytest.approx(logprobs[3])
    full = tinker.ModelInput.from_ints([*PROMPT] * (NUM_POSITIONS // 4))
    assert len(sampler.compute_logprobs(full).result()) == NUM_POSITIONS


def test_a_prompt_is_computed_once_and_its_next_token_is_the_one_that_sampling_draws(tmp_path: Path) -> None:
    prompt, params = tinker.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1)
    found = []
    for scores in (False, True):
        with serving(tmp_path) as (url, routes):
            sampler = client(url).create_sampling_client(base_model=NAME).result()
            asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3} if scores else {}
            found.append(sampler.sample(prompt, 6, params, **asked).result().sequences)
            if scores:
                sampler.compute_logprobs(prompt).result()
                counts = routes.stats()["sampling"]
                assert (counts["prefilled_tokens"], counts["sampled_tokens"]) == (0, 0)
                assert (counts["scored_tokens"], counts["score_passes"]) == (2 * len(PROMPT), 2)
    sampled, drawn = ([(each.tokens, each.stop_reason) for each in sequences] for sequences in found)
    assert drawn == sampled
    assert len({tuple(tokens) for tokens, _ in drawn}) > 1
    for one, other in zip(*found, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-6)


def test_a_state_with_optimizer_resumes_bitwise_and_one_without_starts_fresh(service: tinker.ServiceClient) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=2).result()

    def step(model: Any) -> float:
        result = model.forward_backward(batch(), "cross_entropy")
        model.optim_step(ADAM).result()
        return loss_of(result.result())

    for _ in range(3):
        step(trained)
    path = trained.save_state("third", user_metadata={"of": "me"}).result().path
    expected = [step(trained) for _ in range(3)]
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(resumed) for _ in range(3)] == expected
    anew = service.create_training_client_from_state(path).result()
    found = [step(anew) for _ in range(3)]
    assert found[0] == expected[0]
    assert found[2] != expected[2]
    rest = tinker.RestClient(base_url=service._base_url, api_key="tml-test")
    run = path.split("/")[2]
    (saved,) = rest.list_checkpoints(run).result().checkpoints
    assert (saved.tinker_path, saved.checkpoint_type, saved.user_metadata) == (path, "training", {"of": "me"})
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.base_model, about.is_lora, about.lora_rank, about.train_mlp) == (NAME, True, 4, True)
    assert rest.get_training_run(run).result().last_checkpoint.tinker_path == path
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_models_without_a_seed_train_alike(service: tinker.ServiceClient) -> None:
    losses = []
    for _ in range(2):
        trained = service.create_lora_training_client(base_model=NAME, rank=4).result()
        trained.forward_backward(batch(), "cross_entropy")
        trained.optim_step(ADAM).result()
        losses.append(loss_of(trained.forward(batch(), "cross_entropy").result()))
    assert losses[0] == losses[1]


def test_named_sampler_weights_stay_while_training_goes_on(service: tinker.ServiceClient) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
    params, prompt = types.SamplingParams(max_tokens=8, seed=1), tinker.ModelInput.from_ints(PROMPT)
    unnamed = trained.save_weights_and_get_sampling_client().result()
    path = trained.save_weights_for_sampler("first").result().path
    before = unnamed.sample(prompt, 1, params).result().sequences[0]
    for _ in range(4):
        trained.forward_backward(batch(), "cross_entropy")
        trained.optim_step(ADAM).result()
    newest = trained.save_weights_and_get_sampling_client().result()
    named = service.create_sampling_client(model_path=path).result()
    for sampler in (named, newest, unnamed, named):
        after = sampler.sample(prompt, 1, params).result().sequences[0]
        assert (after.logprobs == before.logprobs) == (sampler is not newest)


def test_a_client_with_its_own_loss_gets_its_gradients(service: tinker.ServiceClient) -> None:
    data = batch()

    def squares(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((each**2).sum() for each in logprobs), {}

    trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=4).result()
    losses = []
    for _ in range(5):
        result = trained.forward_backward_custom(data, squares)
        trained.optim_step(ADAM).result()
        losses.append(loss_of(result.result()))
    assert losses[-1] < 0.8 * losses[0]


def test_all_weights_are_trained_with_rank_0(service: tinker.ServiceClient, server: tuple[str, TinkerRoutes]) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=0).result()
    assert trained.get_info().is_lora is False
    first = loss_of(trained.forward_backward(batch(), "cross_entropy").result())
    trained.optim_step(ADAM).result()
    path = trained.save_state("all").result().path
    second = loss_of(trained.forward(batch(), "cross_entropy").result())
    assert second < first
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert loss_of(resumed.forward(batch(), "cross_entropy").result()) == second
    sampler = trained.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints([*PROMPT, 9])).result()
    (_, output) = trained.forward(batch(), "cross_entropy").result().loss_fn_outputs
    assert scored[-1] == pytest.approx(output["logprobs"].data[-1], rel=1e-6)


def test_one_clients_steps_do_not_change_anothers_tokens(server: tuple[str, TinkerRoutes]) -> None:
    one, other = client(server[0]), client(server[0])
    mine = one.create_lora_training_client(base_model=NAME, rank=4, seed=5).result()
    theirs = other.create_lora_training_client(base_model=NAME, rank=8, seed=6).result()
    mine.forward_backward(batch(), "cross_entropy")
    mine.optim_step(ADAM).result()
    sampler = mine.save_weights_and_get_sampling_client().result()
    params, prompt = types.SamplingParams(max_tokens=8, seed=1), tinker.ModelInput.from_ints(PROMPT)
    before = sampler.sample(prompt, 2, params).result()
    output = mine.forward(batch(), "cross_entropy").result().loss_fn_outputs
    for _ in range(3):
        theirs.forward_backward(batch(), "cross_entropy")
        theirs.optim_step(types.AdamParams(learning_rate=0.1)).result()
        theirs.save_weights_and_get_sampling_client().result().sample(prompt, 1, params).result()
    again = mine.save_weights_and_get_sampling_client().result().sample(prompt, 2, params).result()
    assert [(s.tokens, s.logprobs) for s in again.sequences] == [(s.tokens, s.logprobs) for s in before.sequences]
    for now, then in zip(mine.forward(batch(), "cross_entropy").result().loss_fn_outputs, output, strict=True):
        np.testing.assert_array_equal(now["logprobs"].data, then["logprobs"].data)


def test_an_error_adds_no_gradient_and_later_requests_go_on(service: tinker.ServiceClient) -> None:
    losses = []
    for has_errors in (False, True):
        trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
        trained.forward_backward(batch(), "cross_entropy").result()
        if has_errors:
            wrong = datum([*PROMPT, 1], logprobs=[-1e4] * 4, advantages=[1e38] * 4)
            with pytest.raises(tinker.RequestFailedError, match="loss of sequence"):
                trained.forward_backward([*batch_for_policy(), wrong], "importance_sampling").result()
            with pytest.raises(tinker.BadRequestError, match=r"data\[0\].loss_fn_inputs has no logprobs"):
                trained.forward_backward(batch(), "ppo").result()
        trained.optim_step(ADAM).result()
        losses.append(loss_of(trained.forward(batch(), "cross_entropy").result()))
    assert losses[0] == losses[1]


def batch_for_policy() -> list[tinker.Datum]:
    return [datum([*PROMPT, 1], logprobs=[-1.0] * 4, advantages=[1.0] * 4)]


@pytest.mark.parametrize("loss", ["stable_reinforce", "custom"])
def test_losses_that_are_not_computed_are_refused_with_what_to_write(service: tinker.ServiceClient, loss: Any) -> None:
    trained = service.create_lora_training_client(base_model=NAME, rank=2).result()
    with pytest.raises(tinker.BadRequestError, match=r"importance_sampling|forward_backward_custom"):
        trained.forward_backward(batch_for_policy(), loss).result()


def test_wrong_bodies_are_refused_with_the_field(
    server: tuple[str, TinkerRoutes], service: tinker.ServiceClient
) -> None:
    url, session = server[0], service.holder.get_session_id()
    create = {"session_id": session, "model_seq_id": 99, "base_model": NAME}
    model_id = service.create_lora_training_client(base_model=NAME, rank=2).result().model_id
    cases: list[tuple[str, Any, int, str]] = [
        ("create_model", {**create, "lora_config": {"rank": -1}}, 400, "rank"),
        ("create_model", {**create, "lora_config": {"rank": "8"}}, 400, "rank"),
        ("create_model", {**create, "base_model": "other"}, 404, "other"),
        ("create_model", {**create, "optimizer_config": {"type": "dimuon"}}, 400, "dimuon"),
        ("create_model", {**create, "session_id": "none"}, 404, "none"),
        ("create_session", {"sdk_version": "0.40.0"}, 400, "0.40.0"),
        ("create_session", {"sdk_version": None}, 400, "sdk_version"),
        ("client/config", {"sdk_version": "0.12"}, 400, "0.12"),
        ("optim_step", {"model_id": "x", "adam_params": {}}, 404, "x"),
        ("asample", {"base_model": NAME, "prompt": {"chunks": []}, "sampling_params": {}}, 400, "prompt"),
        ("asample", {"base_model": NAME, "prompt": {"chunks": [{"tokens": [99]}]}, "sampling_params": {}}, 400, "99"),
        (
            "asample",
            {"base_model": NAME, "prompt": {"chunks": [{"type": "image", "data": ""}]}, "sampling_params": {}},
            400,
            "image",
        ),
        (
            "asample",
            {"base_model": NAME, "prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"top_p": 7.0}},
            400,
            "top_p",
        ),
        (
            "asample",
            {"base_model": NAME, "prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"stop": 7}},
            400,
            "stop",
        ),
        ("save_weights", {"model_id": model_id, "path": "x", "ttl_seconds": 2**63}, 400, "ttl_seconds"),
        ("save_weights", {"model_id": model_id, "path": "x", "ttl_seconds": 0}, 400, "ttl_seconds"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "path"),
        ("load_weights", {"session_id": session, "model_seq_id": 98, "path": NO_PATH}, 404, "checkpoint"),
        ("retrieve_future", {"request_id": "nothing"}, 410, "nothing"),
        ("forward_backward", b"\xff\xff\xff", 400, "protobuf"),
        ("optim_step", b"[", 400, "JSON"),
    ]
    for path, body, status, words in cases:
        got, answer = ask(url, path, body)
        message = answer.get("error", {"message": "none"})["message"]
        assert (got, words in message) == (status, True), (path, body, got, answer)


JUNK = (None, True, -1, 2**70, 1e308, float("nan"), "", "x", "\ud800", "tinker://x", [], [None], ["a"], {}, {"a": 1})


def damaged(random: Random, body: Any) -> Any:
    """Return a copy of a JSON value in which one part is another value, or missing."""
    if not isinstance(body, dict | list) or not body or random.random() < 0.1:
        return random.choice(JUNK)
    keys = list(body) if isinstance(body, dict) else list(range(len(body)))
    key, copy = random.choice(keys), body.copy()
    if random.random() < 0.2:
        del copy[key]
    else:
        copy[key] = damaged(random, body[key])
    return copy


def test_no_damaged_body_is_an_error_of_the_server(
    server: tuple[str, TinkerRoutes], service: tinker.ServiceClient
) -> None:
    url, random, session = server[0], Random(0), service.holder.get_session_id()
    model = service.create_lora_training_client(base_model=NAME, rank=2).result()
    saved = model.save_state("whole").result().path
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8}
    sampling = {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": [31]}
    bodies: list[tuple[str, Any]] = [
        ("create_session", {"sdk_version": "0.38.0", "user_metadata": {"a": "b"}}),
        ("create_model", {"session_id": session, "base_model": NAME, "lora_config": {"rank": 2, "seed": 1}}),
        ("optim_step", {"model_id": model.model_id, "adam_params": adam}),
        ("save_weights", {"model_id": model.model_id, "path": "x", "ttl_seconds": 5, "overwrite": True}),
        ("save_weights_for_sampler", {"model_id": model.model_id, "path": "x", "kind": "snapshot"}),
        ("load_weights", {"model_id": model.model_id, "path": saved, "optimizer": True}),
        ("create_sampling_session", {"session_id": session, "base_model": NAME}),
        (
            "asample",
            {
                "base_model": NAME,
                "num_samples": 1,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
                "sampling_params": sampling,
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 1,
                "target_prompt_logprobs": {"data": [3, 4, 5], "shape": [3, 1], "dtype": "int64"},
            },
        ),
        ("weights_info", {"tinker_path": saved}),
    ]
    for _ in range(300):
        path, whole = random.choice(bodies)
        body = damaged(random, whole)
        status, answer = ask(url, path, body)
        assert status in (200, 400, 404), (path, body, answer)
        if "request_id" in answer and path != "asample":
            _, found = ask(url, "retrieve_future", {"request_id": answer["request_id"]})
            assert found.get("category") != "server", (path, body, found)


def test_a_request_that_is_sent_again_runs_once(server: tuple[str, TinkerRoutes]) -> None:
    url = server[0]
    _, session = ask(url, "create_session", {"sdk_version": "0.38.0"})
    create = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
    first, again = (ask(url, "create_model", create)[1] for _ in range(2))
    assert first == again
    model_id = ask(url, "retrieve_future", {"request_id": first["request_id"]})[1]["model_id"]
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    tickets = [ask(url, "optim_step", step)[1] for _ in range(3)]
    assert tickets[0] == tickets[1] == tickets[2]
    ask(url, "retrieve_future", {"request_id": tickets[0]["request_id"]})
    late = {"model_id": model_id, "seq_id": 3, "adam_params": {}}
    _, ticket = ask(url, "optim_step", late)
    assert server[1]._held.model(model_id).num_steps == 1
    ask(url, "optim_step", {**late, "seq_id": 2})
    ask(url, "retrieve_future", {"request_id": ticket["request_id"]})
    assert server[1]._held.model(model_id).num_steps == 3


def test_a_key_is_asked_for_and_silent_clients_are_freed(tmp_path: Path) -> None:
    with serving(tmp_path, key="tml-right", session_timeout_s=4.0) as (url, routes):
        body = {"sdk_version": "0.38.0"}
        assert ask(url, "create_session", body)[0] == 401
        headers = {"X-API-Key": "tml-right"}
        _, session = ask(url, "create_session", body, **headers)
        create = {"session_id": session["session_id"], "base_model": NAME, "lora_config": {"rank": 2}}
        model_id = f"{session['session_id']}:train:0"
        sampling = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 2}}
        requests = [
            ("create_model", create),
            ("save_weights_for_sampler", {"model_id": model_id, "path": "x"}),
            ("asample", {**sampling, "model_path": f"tinker://{model_id}/sampler_weights/x"}),
        ]
        for path, body in requests:
            status, ticket = ask(url, path, body, **headers)
            assert status == 200
            if path != "asample":
                ask(url, "retrieve_future", {"request_id": ticket["request_id"]}, **headers)
        while routes.stats()["sampling"]["sampled_tokens"] == 0:
            time.sleep(0.01)
        held = weakref.ref(routes._held.sessions[session["session_id"]].models[model_id])
        for _ in range(600):
            _, stats = ask(url, "treering/stats", b"", "GET", **headers)
            if stats["sampling"]["engines"] == 0 and held() is None:
                break
            time.sleep(0.05)
        assert (stats["sessions"], stats["models"], stats["sampling"]["engines"]) == (0, 0, 0)
        assert held() is None
        assert ask(url, "session_heartbeat", session, **headers)[0] in (400, 404)


@pytest.mark.parametrize("shares", [True, False])
def test_requests_of_a_step_that_wait_run_as_one_forest_to_the_same_answers(tmp_path: Path, shares: bool) -> None:
    with serving(tmp_path, shares=shares) as (url, routes):
        service = client(url)
        trained = service.create_lora_training_client(base_model=NAME, rank=4, seed=0).result()
        held = threading.Event()
        routes._thread.submit(Job(model_id="other", run=held.wait))
        waiting = [trained.forward_backward([each], "cross_entropy") for each in (*batch(), *batch())]
        update = trained.optim_step(ADAM)
        while len(routes._thread._jobs) < 5:
            time.sleep(0.01)
        held.set()
        losses = [loss_of(each.result()) for each in waiting]
        update.result()
        counts = routes.stats()["training"]
        assert (counts["requests"], counts["forests"]) == ((4, 1) if shares else (4, 4))
        assert (counts["flat_tokens"], counts["computed_tokens"]) == ((18, 5) if shares else (18, 18))
        alone = service.create_lora_training_client(base_model=NAME, rank=4, seed=0).result()
        expected = [loss_of(alone.forward_backward([each], "cross_entropy").result()) for each in (*batch(), *batch())]
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        alone.optim_step(ADAM).result()
        after = [loss_of(each.forward(batch(), "cross_entropy").result()) for each in (trained, alone)]
        assert after[0] == pytest.approx(after[1], rel=1e-9)
