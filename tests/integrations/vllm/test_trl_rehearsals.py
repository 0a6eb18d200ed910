"""TRL with rehearsed batches: what is asked early, and on a real server the rollouts of a run without.

Only the last test needs vLLM's server, and is slow because that takes half a minute to start.
"""

import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM and TRL: make vllm-test")
pytest.importorskip("trl", reason="needs vLLM and TRL: make vllm-test")

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_client import VLLMClient

from tests.integrations.trl import runs
from tests.integrations.vllm import trl_on_cpu as helpers
from tests.integrations.vllm.llms import VOCAB, K
from tests.integrations.vllm.servers import asked, served_as_documented
from tests.integrations.vllm.stub_server import NUM_EARLY, NUM_STABLE, Asked, StubServer, stub_server
from tests.integrations.words import word_tokenizer
from treering.errors import ConfigError, UnsupportedError
from treering.integrations.trl import vllm_drafts, vllm_rehearsals
from treering.integrations.trl.trl_trainers import Overrides
from treering.integrations.trl.vllm_rehearsals import EarlyRequests, check_rehearsals

pytestmark = pytest.mark.filterwarnings("ignore")

Early = dict[tuple[tuple[int, ...], int], list[int]]
GROUP_SIZE, NUM_PROMPTS = 4, 2
"""Rollouts of a prompt, and prompts of a batch; an epoch has four batches."""


@dataclass(kw_only=True)
class Sampled:
    """Requests of each batch, those of later turns and evaluations, and the lines that the trainer logged."""

    batches: list[list[Asked]] = field(default_factory=list)
    early: list[list[Asked]] = field(default_factory=list)
    """What was sampled early since the batch before; the last list is of the end."""
    others: list[Asked] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def take(self, server: StubServer, *, is_batch: bool) -> None:
        """Take what the server was asked since the last call."""
        asked, server.asked = server.asked, []
        now = sorted((one for one in asked if not one.is_early), key=lambda one: one.rollout)
        self.early = self.early or [[]]
        self.early[-1] += [one for one in asked if one.is_early]
        if is_batch:
            self.batches.append(now)
            self.early.append([])
        else:
            self.others += now

    @property
    def rollouts(self) -> list[list[Any]]:
        return [[one.rollout for one in batch] for batch in self.batches]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    end = EarlyRequests.end

    def end_once_all_run(early: EarlyRequests) -> Early:
        deadline = time.monotonic() + 20
        while len(stub.running) < len(early._ids) and time.monotonic() < deadline:
            time.sleep(0.005)
        tokens = end(early)
        stub.running.clear()
        return tokens

    with stub_server(tmp_path / "history") as stub:

        def update(*_: Any) -> None:
            assert not stub.running
            stub.version += 1

        monkeypatch.setattr(VLLMClient, "init_communicator", lambda *args, **kwargs: None)
        monkeypatch.setattr(VLLMClient, "update_named_params", update)
        monkeypatch.setattr(EarlyRequests, "end", end_once_all_run)
        yield stub


def make_trainer(
    server: StubServer, model: Path, out: Path, *, as_chats: bool = False, kind: Any = GRPOTrainer, **options: Any
) -> Any:
    """Make a trainer whose batches have two prompts and four rollouts of each."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": NUM_PROMPTS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 8,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.address,
    }
    make_args = GRPOConfig if kind is GRPOTrainer else RLOOConfig
    args = make_args(output_dir=str(out), **runs.COMMON | given | options)
    prompts: list[Any] = helpers.prompts()
    if as_chats:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokenizer = word_tokenizer(VOCAB)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w2 {% endfor %}"
    data = Dataset.from_dict({"prompt": prompts})
    return kind(str(model), helpers.reward, args, data, eval_dataset=data.select([0]), processing_class=tokenizer)


def train(
    server: StubServer,
    model: Path,
    out: Path,
    *,
    rehearse: bool = True,
    resume: bool = False,
    num_turns: int = 1,
    after_step: Callable[[Any, Any], None] = lambda trainer, control: None,
    **options: Any,
) -> Sampled:
    """Train, and return what the server was asked; `after_step` gets the trainer and its control."""
    # The trainer before holds the history until it is collected.
    gc.collect()
    found = Sampled()
    with vllm_drafts(server.history, rehearse=rehearse):
        trainer = make_trainer(server, model, out, **options)

    def generate(original: Callable[..., Any], **kwargs: Any) -> Any:
        answer = original(**kwargs)
        found.take(server, is_batch=trainer.model.training)
        for _ in range(1, num_turns):
            original(**kwargs | {"prompts": answer["completion_ids"], "n": 1})
            found.take(server, is_batch=False)
        return answer

    class AfterStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            after_step(trainer, control)

    Overrides(trainer.vllm_generation.vllm_client).replace("generate", generate)
    trainer.add_callback(AfterStep())
    trainer.train(resume_from_checkpoint=resume)
    assert not server.running
    found.take(server, is_batch=False)
    found.logs = [log for log in trainer.state.log_history if "loss" in log]
    return found


ORDERS: dict[str, dict[str, Any]] = {
    "an epoch's end": {"max_steps": 6},
    "two passes over a batch": {"max_steps": 10, "num_iterations": 2},
    "two batches an update": {"max_steps": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "an update of a part of a batch": {
        **{"max_steps": 5, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
        "per_device_train_batch_size": 4,
    },
    "evaluation between the steps": {
        **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1},
        "per_device_eval_batch_size": 4,
    },
    "chats": {"max_steps": 3, "as_chats": True},
    "turns": {"max_steps": 3, "num_turns": 2},
    "weights sent in between": {
        "max_steps": 3,
        "after_step": lambda trainer, _: trainer.vllm_generation.sync_weights(),
    },
    "RLOO": {"max_steps": 3, "kind": RLOOTrainer},
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_sampled_early_is_the_next_batch_with_its_own_seeds(
    name: str, server: StubServer, model: Path, tmp_path: Path
) -> None:
    found = train(server, model, tmp_path / "out", **ORDERS[name])
    assert len(found.batches) >= 3
    assert found.early[0] == []
    for batch, early in zip(found.batches[1:], found.early[1:-1], strict=True):
        assert len(batch) == NUM_PROMPTS * GROUP_SIZE
        assert sorted(one.rollout for one in early) == [one.rollout for one in batch]
        for one in batch:
            assert len(one.rehearsed) == NUM_EARLY
            assert one.rehearsed[:NUM_STABLE] == server.tokens(one.rollout, NUM_STABLE)
    # Each request has another seed, and nothing is sampled for a batch that does not come.
    seeds = [one.seed for batch in [*found.batches, found.others] for one in batch]
    assert len({*seeds}) == len(seeds)
    assert found.early[-1] == []
    assert server.num_counted_early == 0
    shares = [log["rehearsal/kept"] for log in found.logs if "rehearsal/kept" in log]
    assert NUM_STABLE / NUM_EARLY - 0.01 < min(shares) <= max(shares) <= 1
    assert {log["rehearsal/tokens"] for log in found.logs if "rehearsal/tokens" in log} == {8 * NUM_EARLY}


def test_a_run_that_is_stopped_leaves_no_request(server: StubServer, model: Path, tmp_path: Path) -> None:
    def stop(_: Any, control: Any) -> None:
        control.should_training_stop = True

    found = train(server, model, tmp_path / "out", max_steps=3, after_step=stop)
    assert len(found.batches) == 1
    assert len(found.early[-1]) == NUM_PROMPTS * GROUP_SIZE


def test_the_order_of_prompts_is_the_trainer_s_own(server: StubServer, model: Path, tmp_path: Path) -> None:
    rehearsed, plain = (
        [
            sorted(one.prompt for one in batch)
            for batch in train(server, model, tmp_path / "out", max_steps=6, rehearse=rehearse).batches
        ]
        for rehearse in (True, False)
    )
    assert rehearsed == plain
    assert rehearsed[0] != rehearsed[4]


def test_a_resumed_run_has_the_seeds_of_one_that_was_not_stopped(
    server: StubServer, model: Path, tmp_path: Path
) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(server, model, tmp_path / "whole", **options)
    train(server, model, tmp_path / "out", **options | {"max_steps": 2})
    resumed = train(server, model, tmp_path / "out", resume=True, **options)
    assert resumed.rollouts == whole.rollouts[2:]
    assert [len(early) for early in resumed.early] == [0, NUM_PROMPTS * GROUP_SIZE, 0]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("fails_early", "rehearsals of 8 of 8 rollouts were lost, 0 still run .*500 Server Error"),
        ("ignores_ends", "rehearsals of 8 of 8 rollouts were lost, 8 still run .no end within 0.2 s."),
    ],
)
def test_what_fails_early_is_lost_in_one_line_and_the_run_goes_on(
    fault: str,
    line: str,
    server: StubServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_rehearsals, "_END_S", 0.2)
    setattr(server, fault, True)
    found = train(server, model, tmp_path / "out", max_steps=2)
    assert len(found.batches[1]) == NUM_PROMPTS * GROUP_SIZE
    assert not any(one.rehearsed for one in found.batches[1])
    lines = [record.message for record in caplog.records if record.name == vllm_rehearsals.__name__]
    assert len(lines) == 1
    assert re.match(line, lines[0])
    assert not any(name.startswith("rehearsal/") for log in found.logs for name in log)


def test_a_server_that_cannot_end_requests_is_refused(server: StubServer, model: Path, tmp_path: Path) -> None:
    server.has_no_ends = True
    with (
        pytest.raises(UnsupportedError, match=r"can end requests.*404 Client Error.*set rehearse=False"),
        vllm_drafts(server.history, rehearse=True),
    ):
        make_trainer(server, model, tmp_path / "out")


def test_a_batch_with_images_is_refused(server: StubServer, model: Path, tmp_path: Path) -> None:
    gc.collect()
    with vllm_drafts(server.history, rehearse=True):
        trainer = make_trainer(server, model, tmp_path / "out")
    Overrides(trainer.vllm_generation.vllm_client).replace(
        "generate", lambda original, **kwargs: original(**kwargs | {"features": [{}]})
    )
    with pytest.raises(ConfigError, match="got a batch with images"):
        trainer.train()


def refused(**changes: Any) -> tuple[Any, Any]:
    """Return a trainer and its `VLLMGeneration` with these attributes."""
    generation = SimpleNamespace(mode="server", generation_kwargs={})
    names = ("_generate", "_tokenize_prompts", "_get_train_sampler", "num_iterations")
    trainer = SimpleNamespace(train_dataset=[], **dict.fromkeys(names))
    for name, value in changes.items():
        setattr(generation if hasattr(generation, name) else trainer, name, value)
    return trainer, generation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "colocate"}, 'got vllm_mode="colocate"; set vllm_mode="server"'),
        ({"generation_kwargs": {"seed": 1, "n": 2}}, "got seed and n in generation_kwargs"),
        ({"rollout_func": print}, "rollout_func makes them"),
        ({"environment_factories": {}}, "environment_factory makes them"),
        ({"train_dataset": iter(())}, "got an IterableDataset; pass a Dataset"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    check_rehearsals(*refused())
    with pytest.raises(ConfigError, match=message):
        check_rehearsals(*refused(**changes))


def test_another_trl_is_refused_by_name() -> None:
    trainer, generation = refused()
    del trainer._get_train_sampler
    with pytest.raises(UnsupportedError, match=r"written for TRL 1\.16, but this one has no _get_train_sampler"):
        check_rehearsals(trainer, generation)


SIZE = 96
REAL = {
    "per_device_train_batch_size": NUM_PROMPTS * GROUP_SIZE,
    "num_generations": GROUP_SIZE,
    "max_completion_length": SIZE,
    "learning_rate": 0.005,
}


@pytest.fixture(scope="module")
def vllm_server(model: Path) -> Iterator[str]:
    """Yield the address of a vLLM server that is started as documented."""
    # vLLM's CPU runner cannot compute the prompt of a request with a seed in parts.
    with served_as_documented(model.parent, model, K, "--no-enable-chunked-prefill") as address:
        yield address


def update(client: Any, metadata: Any, named: Any) -> None:
    """Load new weights from a file instead of by NCCL; no request may run."""
    from safetensors.torch import save_file

    # vLLM refuses this while a request holds keys and values.
    assert client._post(f"{client.base_url}/reset_prefix_cache")["success"]
    folder = Path(os.environ["TREERING_TEST_WEIGHTS"])
    folder.mkdir(exist_ok=True)
    save_file({name: weight.detach().clone() for name, weight in named}, folder / "model.safetensors")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    client.session.post(f"{client.base_url}/collective_rpc", json=body).raise_for_status()


def train_on(
    server: str, model: Path, change: Callable[[Early], Early], *, is_cut: bool = False
) -> tuple[list[Any], list[dict[str, float]]]:
    """Train three steps; return the calls of vLLM and the logs.

    Each batch gets what was sampled early as `change` gives it back: all, or with `is_cut` the first tokens.
    """
    gc.collect()
    begin, end, found = EarlyRequests.__init__, EarlyRequests.end, dict[EarlyRequests, Early]()

    def begin_and_wait(early: EarlyRequests, *args: Any) -> None:
        before = num_rows(server)
        begin(early, *args)
        if is_cut:
            while num_rows(server) - before < 4 * len(early._ids):
                time.sleep(0.005)
        else:
            for thread in early._threads:
                thread.join(60)
        found[early] = change(end(early))
        # vLLM refuses this while a request holds keys and values.
        assert json.loads(asked(f"{server}/reset_prefix_cache", {}))["success"]

    options = {"vllm_mode": "server", "vllm_server_base_url": server, "vllm_server_timeout": 500.0}
    with (
        mock.patch.object(EarlyRequests, "__init__", begin_and_wait),
        mock.patch.object(EarlyRequests, "end", lambda early: found.pop(early)),
    ):
        with vllm_drafts(model.parent / "history", rehearse=True):
            trainer = helpers.make_trainer(model, model.parent / "out", **options | REAL)
        calls = helpers.Calls(trainer)
        trainer.train()
    return calls.found, [log for log in trainer.state.log_history if "loss" in log]


def num_rows(server: str) -> int:
    """Return the rows of all passes of the server's worker."""
    answer = asked(f"{server}/collective_rpc", {"method": "treering_stats", "args": []})
    count: int = json.loads(answer)["results"][0]["num_rows"]
    return count


CHANGES: dict[str, Callable[[Early], Early]] = {
    "kept": lambda early: early,
    "lost": lambda early: {},
    "wrong": lambda early: {rollout: [(token + 1) % VOCAB for token in tokens] for rollout, tokens in early.items()},
    "of another prompt": lambda early: dict(zip(early, [*early.values()][5:] + [*early.values()][:5], strict=True)),
}


@pytest.mark.slow
def test_rollouts_are_those_without_rehearsals_whatever_was_sampled_early(
    vllm_server: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREERING_TEST_WEIGHTS", str(model.parent / "weights"))
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *args, **kwargs: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)
    found = {name: train_on(vllm_server, model, change) for name, change in CHANGES.items()}
    found["cut"] = train_on(vllm_server, model, CHANGES["kept"], is_cut=True)
    expected, plain = found["lost"]
    for calls, logs in found.values():
        assert [call.prompts for call in calls] == [call.prompts for call in expected]
        assert [call.completions for call in calls] == [call.completions for call in expected]
        for call, other in zip(calls, expected, strict=True):
            for one, logprobs in zip(call.answer[2], other.answer[2], strict=True):
                np.testing.assert_allclose(one, logprobs, atol=1e-4)
        for log, without in zip(logs, plain, strict=True):
            assert log["reward"] == pytest.approx(without["reward"], abs=1e-6)
            assert log["reward_std"] == pytest.approx(without["reward_std"], abs=1e-6)
    shares, sizes = (
        {name: [log[metric] for log in logs[1:]] for name, (_, logs) in found.items() if name != "lost"}
        for metric in ("rehearsal/kept", "rehearsal/tokens")
    )
    assert 0.2 < min(shares["kept"]) <= max(shares["kept"]) < 1
    assert max(shares["wrong"]) < 0.1
    # A request that is ended keeps the tokens that it has.
    whole = NUM_PROMPTS * GROUP_SIZE * SIZE
    assert 0.02 * whole < min(sizes["cut"]) < whole
    assert min(shares["cut"]) > 0.2
    # A kept token takes no pass of its own. The first run is without history, and its first batch without rehearsals.
    gained = [log["rollout/tokens_per_forward"] for log in found["kept"][1]]
    assert min(gained[1:]) > 1.5 * gained[0]
