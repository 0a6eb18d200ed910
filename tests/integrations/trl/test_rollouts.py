"""TRL's rollouts from the embedded engine: the trainer's own log-probs, and tokens that drafts do not change."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from tests.engine.protocol_laws import request_of
from tests.integrations.trl import runs
from tests.integrations.words import word_tokenizer
from tests.models import VOCAB, build
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, StateError, UnsupportedError
from treering.integrations.trl import HistoryRollouts
from treering.integrations.trl import rollouts as rollouts_file
from treering.integrations.trl.rollout_state import PromptIds
from treering.integrations.trl.rollouts import OpenTurns, sampling_of
from treering.types import hash_of_prompt

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_PROMPTS, GROUP_SIZE = 6, 4
PROMPTS = [" ".join(f"w{2 + (i * 5 + k) % (VOCAB - 2)}" for k in range(3 + i)) for i in range(NUM_PROMPTS)]


def dataset(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, **columns})


def model() -> PreTrainedModel:
    """A model that prefers some tokens, so that rollouts resemble one another."""
    made = build("qwen3", 0)
    made.lm_head.weight.data *= 3.0
    return made


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def trainer_of(
    folder: Path, rollouts: HistoryRollouts | None, *, policy: Any = None, data: Any = None, **options: Any
) -> Any:
    defaults = {
        "per_device_train_batch_size": 2 * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 12,
        "temperature": 0.9,
        "num_train_epochs": 3,
        "max_steps": -1,
    }
    own = {"reward_funcs": reward, "processing_class": word_tokenizer(VOCAB), "rollout_func": rollouts}
    own |= {"peft_config": options.pop("peft_config", None)}
    data = data or dataset(id=[f"q{i}" for i in range(NUM_PROMPTS)])
    given = {**defaults, **options}
    return runs.trainer_of(
        GRPOTrainer, GRPOConfig, {}, lambda: data, policy or model(), folder, trainer_options=own, **given
    )


class Recording(HistoryRollouts):
    """Rollouts that keep what they returned, with the trainer's own log-probs of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[dict[str, Any]] = []
        self.errors: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        self.calls.append(output)
        names = ("prompt_ids", "completion_ids", "logprobs")
        self.errors += runs.logprob_errors(trainer, *(output[name] for name in names))
        return output


def eager(rollouts: HistoryRollouts) -> HistoryRollouts:
    """Draft wherever a step's time is known, even without a gain, so that no clock decides."""
    costs: Any = rollouts._costs
    costs.may_draft = costs._steps.knows
    costs.is_promising, costs.can_spend = lambda: True, lambda seconds: True
    costs.new_costs = lambda: None
    return rollouts


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def train(folder: Path, rollouts: HistoryRollouts, **options: Any) -> Any:
    trainer = trainer_of(folder, rollouts, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "lora"])
def test_logprobs_are_the_trainers_and_weights_are_those_of_the_step(is_adapted: bool, tmp_path: Path) -> None:
    rollouts = Recording()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    train(tmp_path, rollouts, num_train_epochs=1, peft_config=lora if is_adapted else None)
    assert len(rollouts.calls) == NUM_PROMPTS // 2
    assert max(rollouts.errors) <= 2.5e-5


def test_drafts_change_no_token_and_no_weight(tmp_path: Path) -> None:
    plain, drafted = Recording(drafts="off"), eager(Recording(max_batch=5))
    # In float64, because in float32 a near-tie may flip with the shape of a batch.
    expected = weights_of(train(tmp_path / "plain", plain, policy=model().double()))
    trainer = train(tmp_path / "drafted", drafted, policy=model().double())
    assert [call["completion_ids"] for call in drafted.calls] == [call["completion_ids"] for call in plain.calls]
    logged = [row["rollout/tokens_per_forward"] for row in trainer.state.log_history if "loss" in row]
    assert logged[0] == 1.0 < max(logged)
    for name, weight in weights_of(trainer).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)


def test_a_short_run_logs_that_it_does_not_compile_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollouts_file, "is_compiled", lambda _: False)
    rollouts = HistoryRollouts()
    train(tmp_path, rollouts)
    assert rollouts._history.drafter is None
    assert capsys.readouterr().out.count("To compile them first: python -c 'import treering; treering.Drafter") == 1


def test_a_resumed_run_samples_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    # TRL shuffles a resumed epoch again.
    options = {"save_strategy": "steps", "save_steps": 4, "shuffle_dataset": False}
    whole, resumed = Recording(), Recording()
    expected = weights_of(train(tmp_path / "whole", whole, **options))
    train(tmp_path / "parts", Recording(), max_steps=4, **options)
    trainer = trainer_of(tmp_path / "parts", resumed, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert [call["completion_ids"] for call in resumed.calls] == [call["completion_ids"] for call in whole.calls[4:]]
    for name, weight in weights_of(trainer).items():
        assert torch.equal(weight, expected[name]), name
    assert resumed._ids.state() == whole._ids.state()
    # History keeps rollouts from before the checkpoint, for drafts.
    assert resumed._history.latest().keys() == whole._history.latest().keys()
    elsewhere = trainer_of(tmp_path / "elsewhere", HistoryRollouts(), **{**options, "max_steps": 5})
    with pytest.warns(UserWarning, match="prompts are drawn as in a new run"):
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))


def test_every_epoch_draws_each_prompt_afresh_by_its_id(tmp_path: Path) -> None:
    rollouts = Recording(id_column="name")
    train(tmp_path, rollouts, data=dataset(name=[f"n{i}" for i in range(NUM_PROMPTS)]), learning_rate=0.0)
    assert dict(rollouts._ids.state()) == {f"n{i}": 3 for i in range(NUM_PROMPTS)}
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for call in rollouts.calls:
        for prompt, tokens in zip(call["prompt_ids"], call["completion_ids"], strict=True):
            found.setdefault(tuple(prompt), []).append(tokens)
    for group in found.values():
        assert len(group) == 3 * GROUP_SIZE
        # The weights never change, so repeated noise would repeat rollouts of 12 tokens.
        assert Counter(map(tuple, group)).most_common(1)[0][1] < 3


def test_trls_sampling_parameters_reach_the_engine(tmp_path: Path) -> None:
    options = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    trainer = trainer_of(tmp_path, None, generation_kwargs={"max_new_tokens": 7}, **options)
    sampling = sampling_of(trainer)
    assert {name: getattr(sampling, name) for name in options} == options
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_tokens) == (0.9, 7, (1,))


def greet(name: str) -> str:
    """Greets.

    Args:
        name: who.
    """
    return name


def test_a_later_turn_continues_its_rollout(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, None, policy=model().double())
    rollouts = HistoryRollouts()
    undo = rollouts.attach(trainer)
    prompt = [3, 4, 5]
    first, logprobs = trainer._generate_single_turn([prompt] * 4, None, {}, 4)
    assert [len(tokens) for tokens in first] == [len(values) for values in logprobs]
    contexts = [prompt + tokens + [9, 8] for tokens in (first[2], first[0])]
    before = rollouts._engine._engine.stats
    second, logprobs = trainer._generate_single_turn(contexts, None, {}, 1)
    # Keys and values of the first turns are cached. Each row computes its last token and two observed ones, the last of
    # which is not a prefill.
    assert rollouts._engine._engine.stats.since(before).num_prefilled == 2 * 2
    for context, tokens, values in zip(contexts, second, logprobs, strict=True):
        ids = torch.tensor([context + tokens])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1] / 0.9
        expected = logits.log_softmax(-1).gather(1, ids[0, len(context) :, None])[:, 0]
        np.testing.assert_allclose(values, expected.numpy(), atol=2.5e-5)
    # History has all rollouts of the draw, including those that ended.
    (kept,) = rollouts._history.latest().values()
    tails = {2: [9, 8, *second[0]], 0: [9, 8, *second[1]]}
    whole = {sample: [*tokens, *tails.get(sample, [])] for sample, tokens in enumerate(first)}
    assert {sample: tokens.tolist() for sample, tokens in kept.tokens.items()} == whole
    undo()
    assert "_generate_single_turn" not in vars(trainer)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafts must be one of auto, off"):
        HistoryRollouts(drafts="sometimes")
    with pytest.raises(ConfigError, match=r"id_column='nme' is not a column.*'prompt', 'id'"):
        train(tmp_path, HistoryRollouts(id_column="nme"))
    with pytest.raises(ConfigError, match=r"generation_kwargs.*num_beams.*remove it"):
        train(tmp_path, HistoryRollouts(), generation_kwargs={"num_beams": 2})
    used = HistoryRollouts()
    train(tmp_path, used, max_steps=1)
    with pytest.raises(StateError, match="serves one trainer"):
        train(tmp_path, used, max_steps=1)
    trainer = trainer_of(tmp_path, HistoryRollouts())
    with pytest.raises(StateError, match="rollout_func"):
        HistoryRollouts().attach(trainer)
    with pytest.raises(ConfigError, match="hash of its tokens, got id_column='id'"):
        HistoryRollouts(id_column="id").attach(trainer_of(tmp_path, None))
    with pytest.raises(UnsupportedError, match="this SimpleNamespace has no tools"):
        HistoryRollouts().attach(SimpleNamespace(rollout_func=None))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_is_vlm", True, "takes images"),
        ("use_vllm", True, "set use_vllm=False"),
        ("is_fsdp_enabled", True, "shards them; use DDP"),
        ("is_deepspeed_enabled", True, "shards them; use DDP"),
        ("tools", [greet], r"attach\(trainer\)"),
    ],
)
def test_a_trainer_that_the_engine_cannot_serve_is_refused_by_name(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    trainer = trainer_of(tmp_path, None)
    setattr(trainer, name, value)
    with pytest.raises(UnsupportedError, match=message):
        HistoryRollouts()(PROMPTS[:1], trainer)


def test_each_process_of_ddp_samples_with_its_own_noise(tmp_path: Path) -> None:
    found = []
    for rank in (0, 1):
        trainer = trainer_of(tmp_path, None)
        trainer.accelerator.state.process_index = rank
        found.append(HistoryRollouts()(PROMPTS[:1] * 4, trainer)["completion_ids"])
        trainer.accelerator.state.process_index = 0
    assert not any(tokens in found[0] for tokens in found[1])


def test_a_prompt_without_an_id_is_known_by_its_tokens() -> None:
    ids = PromptIds(Dataset.from_dict({"prompt": ["a", "b"]}), None)
    assert ids.of("a", [5, 6]) == hash_of_prompt([5, 6]) != hash_of_prompt([6, 5])
    named = PromptIds(Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]], "index": [7]}), None)
    assert named.of([{"content": "a", "role": "user"}], [5]) == 7
    assert named.of([{"content": "b", "role": "user"}], [5]) == hash_of_prompt([5])
    assert [named.draw([7, "x"]), named.draw([7])] == [{7: 0, "x": 0}, {7: 1}]
    with pytest.raises(ConfigError, match=r"'id' holds 1\.5"):
        PromptIds(Dataset.from_dict({"prompt": ["a"], "id": [1.5]}), None)


def test_a_context_continues_the_longest_rollout_that_begins_it_once() -> None:
    turns, engine = OpenTurns(), TorchEngine(model())
    request = request_of(0)
    (rollout,) = engine.generate([request])
    turns.put([request], [rollout])
    whole = [*request.prompt.tolist(), *rollout.tokens.tolist()]
    found = turns.take([[*whole, 9], [*whole, 9], [9, 9]])
    assert [turn is None for turn in found] == [False, True, True]
    assert found[0] is not None
    assert found[0].so_far.tokens.tolist() == [*rollout.tokens.tolist(), 9]
