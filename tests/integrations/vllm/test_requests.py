"""Typical RL requests get the same tokens, texts and ends with drafts as without, whatever history holds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treering.integrations.vllm import record

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB = 128
NUM_PROMPTS, NUM_TOKENS = 8, 48
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["sum", "loop", "other"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CHOICES = ["the sum of the tags", "the sum of all names", "a loop", "none of them"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sampling parameters, a constraint of structured outputs, and how drafts are verified."""

    params: dict[str, Any] = field(default_factory=dict)
    structure: dict[str, Any] | None = None
    verification: str = "rejection"


SEEDED = {"temperature": 1.0, "seed": 7}
CASES = {
    "JSON schema": Case(params={"ignore_eos": False}, structure={"json": SCHEMA}),
    "choices": Case(params={"ignore_eos": False}, structure={"choice": CHOICES}),
    "min_tokens with stop tokens": Case(params={"min_tokens": 12, "stop_token_ids": list(range(1, VOCAB, 3))}),
    "penalties": Case(params={"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
    "n=3, seeded, with prompt log-probs": Case(
        params={**SEEDED, "n": 3, "prompt_logprobs": 1, "logprobs": 1}, verification="exact"
    ),
    "JSON schema, seeded": Case(
        params={**SEEDED, "ignore_eos": False}, structure={"json": SCHEMA}, verification="exact"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")
    from tests.integrations.vllm.worded import save_worded_model

    made = tmp_path_factory.mktemp("worded")
    save_worded_model(made)
    return made


def make(folder: Path, **settings: Any) -> Any:
    from tests.integrations.vllm.in_process import make_llm

    return make_llm(folder, skip_tokenizer_init=False, enable_prefix_caching=True, **settings)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def drafting(plain: Any, folder: Path, draft_settings: Any) -> Any:
    from treering.integrations.vllm import register

    register()
    return make(folder, **draft_settings())


@pytest.fixture
def store(history_folder: Path) -> Iterator[Any]:
    from treering.history.store.store import HistoryStore

    with HistoryStore(history_folder) as opened:
        yield opened


def contexts(name: str) -> list[list[int]]:
    """Return prompts of a case, each of them twice: the second copies draft from the first."""
    rng = np.random.default_rng([*name.encode()])
    return [rng.integers(1, VOCAB, 24).tolist() for _ in range(NUM_PROMPTS)] * 2


def params_of(case: Case, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    plain = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "structured_outputs": None}
    if case.structure is not None:
        plain["structured_outputs"] = StructuredOutputsParams(**case.structure)
    return SamplingParams(**plain | case.params | more)


def ask(llm: Any, prompts: list[list[int]], params: Any, **more: Any) -> list[Any]:
    from tests.integrations.vllm.in_process import generate

    return generate(llm, prompts, params, **more)


def seen(outputs: list[Any]) -> list[Any]:
    """Return the caller's view of each completion: its tokens, its text, and why it ended."""
    return [
        (list(one.token_ids), one.text, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def first_difference(found: list[Any], expected: list[Any]) -> Any:
    """Return the first difference, or None; pytest needs minutes to print the difference of such long lists."""
    pairs = zip(seen(found), seen(expected), strict=True)
    return next(((i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)


def learn(llm: Any, store: Any, outputs: list[Any]) -> None:
    """Record rollouts as history that the drafter has read."""
    record(store, outputs, version=0)
    store.publish()
    llm.collective_rpc("treering_refresh")


def accepted(llm: Any) -> int:
    from tests.integrations.vllm.in_process import stats_of

    return int(stats_of(llm)["num_accepted"])


@pytest.fixture
def verified(drafting: Any) -> Iterator[Any]:
    yield lambda how: drafting.collective_rpc("treering_verify", args=(how,))
    drafting.collective_rpc("treering_verify", args=("rejection",))


@pytest.mark.parametrize("name", CASES)
def test_drafts_of_running_rows_and_of_history_change_nothing_that_a_caller_sees(
    plain: Any, drafting: Any, store: Any, verified: Any, name: str
) -> None:
    case, prompts = CASES[name], contexts(name)
    params = params_of(case)
    expected = ask(plain, prompts, params)
    verified(case.verification)
    before = accepted(drafting)
    assert first_difference(ask(drafting, prompts, params), expected) is None
    # History also has rollouts that the constraint forbids.
    learn(drafting, store, [*expected, *ask(plain, prompts[:NUM_PROMPTS], params_of(Case()))])
    running = accepted(drafting)
    again = ask(drafting, prompts, params)
    assert first_difference(again, expected) is None
    # Rows with a penalty for repetition seldom repeat.
    assert running > before or name == "penalties"
    assert accepted(drafting) - running > 0.5 * sum(len(one.token_ids) for o in again for one in o.outputs)
    for one, other in zip(again, expected, strict=True):
        assert_same_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        for rollout, plain_one in zip(one.outputs, other.outputs, strict=True):
            assert_same_logprobs(rollout.logprobs, plain_one.logprobs)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    """Check that keys are equal, and values too up to the rounding of another batch."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        assert (one or {}).keys() == (other or {}).keys()
        for token, value in (one or {}).items():
            assert value.logprob == pytest.approx(other[token].logprob, abs=2e-5)


def stop_in(text: str) -> str:
    """Return two letters from the middle of a text that do not occur earlier in it."""
    positions = range(len(text) // 2, len(text) - 2)
    return next(text[i : i + 2] for i in positions if text.index(text[i : i + 2]) == i)


@pytest.mark.parametrize("is_kept", [False, True], ids=["left out", "kept"])
def test_a_stop_string_ends_a_text_in_the_middle_of_an_accepted_draft(
    plain: Any, drafting: Any, store: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integrations.vllm.in_process import runner_of

    prompts = contexts(f"stop {is_kept}")
    whole = ask(plain, prompts, params_of(Case()))
    params = [
        params_of(Case(), stop=[stop_in(output.outputs[0].text)], include_stop_str_in_output=is_kept, logprobs=1)
        for output in whole
    ]
    expected = ask(plain, prompts, params)
    assert {one[2] for one in seen(expected)} == {"stop"}
    assert first_difference(ask(drafting, prompts, params), expected) is None
    learn(drafting, store, whole)
    runner, num_sampled = runner_of(drafting), [0]
    sample = runner.sample_tokens

    def count(*args: Any) -> Any:
        output = sample(*args)
        num_sampled[0] += sum(map(len, output.sampled_token_ids))
        return output

    monkeypatch.setattr(runner, "sample_tokens", count)
    again = ask(drafting, prompts, params)
    assert first_difference(again, expected) is None
    for one, other in zip(again, expected, strict=True):
        assert_same_logprobs(one.outputs[0].logprobs, other.outputs[0].logprobs)
    # The worker had continued after the stop.
    assert num_sampled[0] > sum(len(tokens) for tokens, *_ in seen(again)) + NUM_PROMPTS


def test_rollouts_that_sleep_go_on_with_the_same_tokens(plain: Any, drafting: Any, store: Any) -> None:
    """On CPU vLLM pauses its scheduler and drops keys and values; it has nothing to free there."""
    prompts = contexts("sleep")[:NUM_PROMPTS]
    expected = ask(plain, prompts, params_of(Case()))
    learn(drafting, store, expected)
    engine = drafting.llm_engine
    for number, ids in enumerate(prompts):
        engine.add_request(f"sleeper {number}", {"prompt_token_ids": ids}, params_of(Case()))
    ended: dict[str, Any] = {}
    num_steps = 0
    while engine.has_unfinished_requests() and num_steps < 2 * NUM_TOKENS:
        ended.update((output.request_id, output) for output in engine.step() if output.finished)
        num_steps += 1
        if num_steps == 4:
            assert not ended
            drafting.sleep(level=1, mode="keep")
            assert engine.is_sleeping()
            drafting.wake_up()
    assert first_difference([ended[f"sleeper {number}"] for number in range(NUM_PROMPTS)], expected) is None


@pytest.mark.parametrize("is_asked", [False, True])
def test_asynchronous_scheduling_is_turned_off_with_drafts_or_refused(folder: Path, is_asked: bool) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from tests.integrations.vllm.in_process import drafts

    args = EngineArgs(str(folder), dtype="float32", **drafts())
    if not is_asked:
        assert args.create_engine_config().scheduler_config.async_scheduling is False
        return
    args.async_scheduling = True
    with pytest.raises(ValueError, match="async scheduling is only supported with EAGLE"):
        args.create_engine_config()


def test_rows_of_several_lora_adapters_in_one_batch_keep_their_tokens(
    folder: Path, draft_settings: Any, store: Any, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    from tests.integrations.vllm.worded import save_lora

    for seed in (1, 2):
        save_lora(tmp_path / str(seed), seed=seed)
    adapters = [
        None,
        *(LoRARequest(f"adapter {seed}", seed, str(tmp_path / str(seed))) for seed in (1, 2)),
    ] * NUM_PROMPTS
    # Each prompt under the base model and under both adapters, which share its history.
    prompts = [ids for ids in contexts("adapters")[:NUM_PROMPTS] for _ in range(3)]
    # One more than are used: on CPU, rows without an adapter get the one in the last place (vllm #48421).
    settings, params = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}, params_of(Case())
    expected = ask(make(folder, **settings), prompts, params, lora_request=adapters)
    tokens = [one[0] for one in seen(expected)]
    assert all(len({*map(tuple, tokens[i : i + 3])}) == 3 for i in range(0, len(tokens), 3))
    llm = make(folder, **draft_settings(), **settings)
    assert first_difference(ask(llm, prompts, params, lora_request=adapters), expected) is None
    learn(llm, store, expected)
    before = accepted(llm)
    assert first_difference(ask(llm, prompts, params, lora_request=adapters), expected) is None
    assert accepted(llm) - before > 0.3 * NUM_TOKENS * len(prompts)
