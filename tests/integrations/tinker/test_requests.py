"""Requests are listed, bounded, repeated and refused as Tinker's own client expects."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="needs Tinker's client: make tinker-test")

import tinker

from tests.integrations.tinker.serving import (
    ADAM,
    NAME,
    PROMPT,
    ask,
    batch,
    client,
    decode,
    held,
    loss_of,
    serving,
    wait_until,
)
from treering.serving.tinker import routes as routes_module
from treering.serving.tinker import sessions, wire
from treering.serving.tinker.routes import TinkerRoutes
from treering.train.loop import trainee


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerRoutes]]:
    with serving(tmp_path_factory.mktemp("checkpoints"), max_sessions=512, max_models=512) as opened:
        yield opened


def test_runs_and_checkpoints_are_listed_page_by_page(server: tuple[str, TinkerRoutes]) -> None:
    service = client(server[0])
    for _ in range(2):
        trained = service.create_lora_training_client(base_model=NAME, rank=2, user_metadata={"of": "run"}).result()
        for name in ("a", "b"):
            trained.save_state(name).result()
    rest = tinker.RestClient(base_url=server[0], api_key="tml-test")
    assert rest.list_training_runs(limit=1, offset=5).result().training_runs == []
    pages = [rest.list_training_runs(limit=1, offset=i).result() for i in range(2)]
    assert pages[0].training_runs[0].user_metadata == {"of": "run"}
    assert len({each.training_run_id for page in pages for each in page.training_runs}) == 2
    assert (pages[1].cursor.offset, pages[1].cursor.limit, pages[1].cursor.total_count) == (1, 1, 2)
    whole = rest.list_user_checkpoints().result()
    assert len(whole.checkpoints) == whole.cursor.total_count == 4
    assert rest.list_user_checkpoints(limit=3, offset=2).result().checkpoints == whole.checkpoints[2:]
    status, answer = ask(server[0], "checkpoints?limit=-1", None, "GET")
    assert (status, "limit" in answer["error"]["message"]) == (400, True)


def test_a_client_holds_bounded_bytes_and_sends_again_what_found_no_room(
    server: tuple[str, TinkerRoutes], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, routes = server
    trained = client(url).create_lora_training_client(base_model=NAME, rank=2).result()
    session = routes._held.sessions[trained.model_id.partition(":")[0]]
    monkeypatch.setattr(sessions, "MAX_WAITING_BYTES", 10_000)
    with held(routes):
        waiting = [trained.forward_backward(batch(), "cross_entropy") for _ in range(6)]
        wait_until(lambda: len(routes._thread._jobs) >= 2)
        time.sleep(0.5)
        assert len(routes._thread._jobs) == 3
    # What was refused came again, in order.
    assert len({loss_of(each.result()) for each in waiting}) == 1
    before = len(session.promises)
    monkeypatch.setattr(sessions, "MAX_ANSWER_BYTES", 20_000)
    for _ in range(10):
        trained.forward(batch(), "cross_entropy").result()
    assert session.num_bytes == sum(each.num_bytes for each in session.promises.values()) < 25_000 + 4096
    assert len(session.promises) < before
    _, sampler = ask(url, "create_sampling_session", {"session_id": session.id, "base_model": NAME})
    call = {**sampler, "prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}
    found = [ask(url, "asample", {**call, "seq_id": 1 + i}) for i in range(8)]
    assert {status for status, _ in found} == {200, 503}
    assert "fetch them" in found[-1][1]["error"]["message"]
    for status, ticket in found:
        if status == 200:
            ask(url, "retrieve_future", {"request_id": ticket["request_id"]})
    assert ask(url, "asample", {**call, "seq_id": 9})[0] == 200


def test_a_batch_is_bounded_in_bytes(server: tuple[str, TinkerRoutes], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = client(server[0]).create_lora_training_client(base_model=NAME, rank=2).result()
    monkeypatch.setattr(wire, "MAX_WAITING_BYTES", 100)
    with pytest.raises(tinker.BadRequestError, match="send less at once"):
        trained.forward_backward(batch(), "cross_entropy").result()


def test_likeliest_tokens_of_samples_are_bounded_before_anything_is_sampled(
    server: tuple[str, TinkerRoutes], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, routes = server
    monkeypatch.setattr(routes_module, "MAX_CELLS", 400)
    before = routes.stats()["sampling"]["sampled_tokens"]
    # 8 samples of 4 tokens before and at most 6 after, whose whole sequences are scored.
    call = {
        "base_model": NAME,
        "num_samples": 8,
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 6},
    }
    status, answer = ask(url, "asample", {**call, "topk_sample_logprobs": 6})
    assert (status, "topk_sample_logprobs must lie in [0, 5] for 80" in answer["error"]["message"]) == (400, True)
    assert routes.stats()["sampling"]["sampled_tokens"] == before
    status, ticket = ask(url, "asample", {**call, "topk_sample_logprobs": 5, "topk_prompt_logprobs": 20})
    assert status == 200
    assert ask(url, "retrieve_future", {"request_id": ticket["request_id"]})[0] == 200


def record(model_id: str, seq_id: int) -> bytes:
    """Return the body of a `forward_backward` that one datum trains."""
    from tinker.proto import tinker_public_pb2 as records

    body = records.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    sent = body.data.add()
    sent.model_input.add().encoded_text.tokens = np.array(PROMPT[:-1], np.int32).tobytes()
    targets = sent.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(PROMPT[1:], np.int64).tobytes(), records.DTYPE_INT64
    targets.shape.append(3)
    return bytes(body.SerializeToString())


def test_batches_and_calls_that_are_sent_twice_run_once(server: tuple[str, TinkerRoutes]) -> None:
    url, routes = server
    losses = []
    for num_sent in (1, 3):
        model_id = client(url).create_lora_training_client(base_model=NAME, rank=2).result().model_id
        before = routes.stats()["training"]["requests"]
        found = [ask(url, "forward_backward", record(model_id, 1)) for _ in range(num_sent)]
        assert found == [found[0]] * num_sent
        assert ask(url, "retrieve_future", found[0][1])[0] == 200
        # One that comes after the answer is the same request, too.
        assert ask(url, "forward_backward", record(model_id, 1)) == found[0]
        assert routes.stats()["training"]["requests"] == before + 1
        ask(url, "optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}})
        losses.append(ask(url, "retrieve_future", ask(url, "forward_backward", record(model_id, 3))[1]))
    assert losses[0] == losses[1]
    _, session = ask(url, "create_session", {"sdk_version": "0.38.0"})
    _, sampler = ask(url, "create_sampling_session", {**session, "base_model": NAME})
    params = {"max_tokens": 4, "stop": []}
    call = {**sampler, "seq_id": 1, "num_samples": 2, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    before = routes.stats()["sampling"]["sampled_tokens"]
    tickets = [ask(url, "asample", {**call, "sampling_params": params}) for _ in range(3)]
    assert tickets == [tickets[0]] * 3
    status, refused = ask(url, "retrieve_future", tickets[0][1], Accept="application/json")
    assert (status, "application/x-protobuf" in refused["error"]["message"]) == (406, True)
    answers = [ask(url, "retrieve_future", tickets[0][1]) for _ in range(2)]
    assert answers[0] == answers[1]
    assert routes.stats()["sampling"]["sampled_tokens"] == before + 8


def test_scores_of_two_clients_that_wait_share_one_pass(server: tuple[str, TinkerRoutes]) -> None:
    url, routes = server
    samplers = [client(url).create_sampling_client(base_model=NAME).result() for _ in range(2)]
    prompts = [tinker.ModelInput.from_ints([*PROMPT, last]) for last in (1, 9)]
    alone = [sampler.compute_logprobs(prompt).result() for sampler, prompt in zip(samplers, prompts, strict=True)]
    before, is_over = routes.stats()["sampling"], threading.Event()
    routes._pool._host.run(is_over.wait)
    try:
        waiting = [sampler.compute_logprobs(prompt) for sampler, prompt in zip(samplers, prompts, strict=True)]
        wait_until(lambda: len(routes._pool._samplers[""]._waiting) == 2)
    finally:
        is_over.set()
    together = [each.result() for each in waiting]
    assert routes.stats()["sampling"]["score_passes"] == before["score_passes"] + 1
    for one, other in zip(together, alone, strict=True):
        assert one[1:] == pytest.approx(other[1:], rel=1e-6)


def test_sampling_goes_on_while_another_client_trains(server: tuple[str, TinkerRoutes]) -> None:
    url, routes = server
    trained = client(url).create_lora_training_client(base_model=NAME, rank=2).result()
    own = trained.save_weights_and_get_sampling_client().result()
    base = client(url).create_sampling_client(base_model=NAME).result()
    with held(routes):
        waiting = trained.forward_backward(batch(), "cross_entropy")
        for sampler in (own, base):
            params = tinker.SamplingParams(max_tokens=2, stop=[])
            answer = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, params).result(timeout=60)
            assert [len(each.tokens) for each in answer.sequences] == [2, 2]
        assert routes._thread._jobs
    waiting.result()


NO_MEMORY, NO_DISK = MemoryError(), OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("error", "fix"), [(NO_MEMORY, "send less at once"), (NO_DISK, "free space")])
@pytest.mark.parametrize("saves", [False, True])
def test_a_full_memory_or_disk_fails_one_request_with_a_fix(
    server: tuple[str, TinkerRoutes], monkeypatch: pytest.MonkeyPatch, error: Exception, fix: str, saves: bool
) -> None:
    service = client(server[0])
    trained, other = (service.create_lora_training_client(base_model=NAME, rank=2).result() for _ in range(2))

    def step(model: Any) -> float:
        result = model.forward_backward(batch(), "cross_entropy")
        model.optim_step(ADAM).result()
        return loss_of(result.result())

    assert step(trained) == step(other)

    def fail(whole: Any) -> Any:
        def then_fail(*args: Any, **given: Any) -> None:
            whole(*args, **given)
            raise error

        return then_fail

    with monkeypatch.context() as patch:
        if saves:
            patch.setattr(trainee.Trainee, "save", fail(trainee.Trainee.save))
        else:
            patch.setattr(trainee, "score_targets", fail(trainee.score_targets))
        with pytest.raises(tinker.RequestFailedError, match=fix):
            (trained.save_state("full") if saves else trained.forward_backward(batch(), "cross_entropy")).result()
    run = trained.model_id
    rest = tinker.RestClient(base_url=server[0], api_key="tml-test")
    assert rest.list_checkpoints(run).result().checkpoints == []
    path = trained.save_state("full").result().path
    assert [step(trained), step(trained)] == [step(other), step(other)]
    assert step(service.create_training_client_from_state_with_optimizer(path).result()) < step(
        service.create_lora_training_client(base_model=NAME, rank=2).result()
    )


def test_a_client_goes_back_to_a_state(server: tuple[str, TinkerRoutes]) -> None:
    trained = client(server[0]).create_lora_training_client(base_model=NAME, rank=2).result()

    def steps(number: int) -> list[float]:
        found = []
        for _ in range(number):
            result = trained.forward_backward(batch(), "cross_entropy")
            trained.optim_step(ADAM).result()
            found.append(loss_of(result.result()))
        return found

    steps(3)
    path = trained.save_state("third").result().path
    expected = steps(3)
    # Gradients that were added before a load are dropped.
    trained.forward_backward(batch(), "cross_entropy").result()
    trained.load_state_with_optimizer(path).result()
    assert steps(3) == expected
    trained.load_state(path).result()
    anew = steps(3)
    assert anew[0] == expected[0]
    assert anew[2] != expected[2]
    service = client(server[0])
    other = service.create_lora_training_client(base_model=NAME, rank=4).result()
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="rank"):
        other.load_state(path).result()


def test_samples_end_at_stop_strings_and_keep_to_top_k_and_top_p(server: tuple[str, TinkerRoutes]) -> None:
    sampler = client(server[0]).create_sampling_client(base_model=NAME).result()
    prompt = tinker.ModelInput.from_ints(PROMPT)

    def sample(number: int = 8, **given: Any) -> list[Any]:
        params = tinker.SamplingParams(**{"max_tokens": 6, "stop": [], "seed": 2} | given)
        return list(sampler.sample(prompt, number, params).result().sequences)

    (whole,) = sample(1)
    text = decode(np.array(whole.tokens))
    (cut,) = sample(1, stop=text[2:4])
    assert (cut.tokens, cut.stop_reason) == (whole.tokens[: text.index(text[2:4]) + 2], "stop")
    (same,) = sample(1, stop=["no such text"])
    assert (same.tokens, same.stop_reason) == (whole.tokens, "length")
    (likeliest,) = sample(1, temperature=0.0)
    for given in ({"top_k": 1}, {"top_p": 1e-6}):
        assert {tuple(each.tokens) for each in sample(**given)} == {tuple(likeliest.tokens)}
    answer = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1), topk_sample_logprobs=8).result()
    order = [token for token, _ in answer.sequences[0].topk_logprobs[0]]
    firsts = {each.tokens[0] for each in sample(64, top_k=3, max_tokens=1)}
    assert firsts == set(order[:3])
    values = [value for _, value in answer.sequences[0].topk_logprobs[0]]
    nucleus = 1 + int(np.searchsorted(np.cumsum(np.exp(values)), 0.12))
    firsts = {each.tokens[0] for each in sample(64, top_p=0.12, max_tokens=1)}
    assert firsts <= set(order[:nucleus])
    assert len(firsts) > 1


def test_drafts_change_no_token_and_are_accepted(tmp_path: Path) -> None:
    found, accepted = [], []
    for drafts in (False, True):
        with serving(tmp_path, drafts=drafts) as (url, routes):
            sampler = client(url).create_sampling_client(base_model=NAME).result()
            params = [
                tinker.SamplingParams(max_tokens=24, stop=[], temperature=0.0),
                tinker.SamplingParams(max_tokens=24, stop=[], seed=3),
                tinker.SamplingParams(max_tokens=24, stop=[]),
            ]
            prompt = tinker.ModelInput.from_ints(PROMPT)
            answers = [sampler.sample(prompt, 4, each).result() for each in [*params, *params]]
            found.append([each.tokens for answer in answers for each in answer.sequences])
            accepted.append(routes.stats()["sampling"]["accepted_tokens"])
    assert found[0] == found[1]
    assert accepted[0] == 0 < accepted[1]


def test_checkpoints_expire(server: tuple[str, TinkerRoutes]) -> None:
    url, routes = server
    service = client(url)
    trained = service.create_lora_training_client(base_model=NAME, rank=2).result()
    path = trained.save_state("brief", ttl_seconds=1).result().path
    kept = trained.save_state("kept", ttl_seconds=3600).result().path
    rest = tinker.RestClient(base_url=url, api_key="tml-test")

    def listed() -> list[str]:
        return [each.tinker_path for each in rest.list_checkpoints(trained.model_id).result().checkpoints]

    wait_until(lambda: listed() == [kept])
    assert not routes._checkpoints.folder_of(path).exists()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_more_sessions_and_models_than_the_limit_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, max_sessions=1, max_models=1) as (url, _):
        _, session = ask(url, "create_session", {"sdk_version": "0.38.0"})
        status, answer = ask(url, "create_session", {"sdk_version": "0.38.0"})
        assert (status, "1 sessions are open" in answer["error"]["message"]) == (503, True)
        create = {"session_id": session["session_id"], "base_model": NAME, "lora_config": {"rank": 2}}
        assert ask(url, "create_model", create)[0] == 200
        status, answer = ask(url, "create_model", {**create, "model_seq_id": 1})
        assert (status, "1 models are trained" in answer["error"]["message"]) == (503, True)
