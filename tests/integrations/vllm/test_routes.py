"""Routes that vLLM returns reach training: gradients are those of flat sequences with the same experts.

vLLM's CPU build returns none, so an object with vLLM's interface stands in. Does not need vLLM.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from tests.rl.runs import scripted_loop
from tests.train.gradient.flat_routers import routers_of
from tests.train.gradient.test_routed_experts import told
from treering.engine.protocol import Request, Rollout, Sampling
from treering.errors import InputError, StateError, UnsupportedError
from treering.integrations.vllm import llm as llm_module
from treering.integrations.vllm import vllm_engine
from treering.integrations.vllm.llm import DraftsInVLLM, LLMSettings, make_llm, routed_layers
from treering.integrations.vllm.vllm_engine import VLLMEngine
from treering.objectives import sft
from treering.rl.batch import make_rl_batch
from treering.rl.collect import Group
from treering.rl.environments.policy_calls import Call, branches_of
from treering.rl.step_report import as_trajectories
from treering.rl.tasks.task import Prompt
from treering.train.step import backward

LAYERS, WITH_EXPERTS, VOCAB = 3, [1, 2], 64
PROMPT = np.array([5, 6, 7, 8, 9], np.int32)
SHAPE = {"num_hidden_layers": LAYERS, "mlp_only_layers": [0], "layer_types": ["full_attention"] * LAYERS}


def letters(tokens: Any) -> str:
    return "".join(chr(97 + int(token)) for token in tokens)


class StandIn:
    """LLM with vLLM's interface, whose model routes as it likes: it samples a token per pass and row."""

    def __init__(self, model: Any) -> None:
        self.model, self.rows, self.noise = model, {}, torch.Generator().manual_seed(0)
        self.spoil = lambda routes: routes
        config = model.config
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                logprobs_mode="processed_logprobs",
                quantization=None,
                is_moe=True,
                max_model_len=64,
                hf_text_config=config,
                get_vocab_size=lambda: config.vocab_size,
            ),
            scheduler_config=SimpleNamespace(async_scheduling=False, enable_chunked_prefill=True, max_num_seqs=8),
            device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=SimpleNamespace(world_size=1, worker_extension_cls=""),
            load_config=SimpleNamespace(load_format="auto"),
            aux_output_config=SimpleNamespace(enable_return_routed_experts=True),
            speculative_config=None,
        )
        self.llm_engine = self
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})

    def has_unfinished_requests(self) -> bool:
        return bool(self.rows)

    def collective_rpc(self, method: str, **_arguments: Any) -> list[None]:
        return [None]

    def reset_prefix_cache(self) -> bool:
        return True

    def set_weight_version(self, version: str) -> None:
        pass

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.rows[name] = SimpleNamespace(context=list(prompt["prompt_token_ids"]), left=params.max_tokens, num_rows=0)
        self.output_processor.external_req_ids[name] = [name + "-inside"]
        self.output_processor.request_states[name + "-inside"] = SimpleNamespace(routed_experts_chunks=[])

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            del self.rows[name]
            for inside in self.output_processor.external_req_ids.pop(name):
                del self.output_processor.request_states[inside]

    def step(self) -> list[Any]:
        return [self.sample(name, row) for name, row in list(self.rows.items())]

    def sample(self, name: str, row: Any) -> Any:
        routes = np.zeros((len(row.context), LAYERS, 2), np.uint8)
        logits, routes[:, WITH_EXPERTS] = computed(self.model, row.context)
        logprobs = logits[-1].log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=self.noise))
        chunks = self.output_processor.request_states[name + "-inside"].routed_experts_chunks
        chunks.append(routes[row.num_rows :])
        row.num_rows, row.left = len(row.context), row.left - 1
        row.context.append(token)
        ends = row.left == 0
        output = SimpleNamespace(
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=float(logprobs[token]))}],
            finish_reason="length" if ends else None,
            weight_versions=None,
            routed_experts=self.spoil(np.concatenate(chunks)) if ends else None,
            spec_decode_metrics=None,
        )
        if ends:
            self.abort_request([name])
        return SimpleNamespace(
            request_id=name, outputs=[output], finished=ends, prompt_token_ids=[], num_cached_tokens=0
        )


def computed(model: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return the logits of a sequence, and the experts that the model chose: [T, layers with experts, k]."""
    found: list[torch.Tensor] = []
    hooks = [one.register_forward_hook(lambda _m, _i, output: found.append(output[2])) for one in routers_of(model)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found, 1).numpy()


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """An LLM whose weights are not those of training, so that it chooses other experts."""
    monkeypatch.setattr(
        vllm_engine,
        "sampling_params",
        lambda request, *, num_tokens, **_: SimpleNamespace(max_tokens=request.sampling.max_tokens - num_tokens),
    )
    return StandIn(build_float64("qwen3_moe", seed=1, **SHAPE).eval())


@pytest.fixture
def model() -> Any:
    return build_float64("qwen3_moe", **SHAPE)


def requests(num: int = 4, stop: str = "", size: int = 6) -> list[Request]:
    sampling = Sampling(max_tokens=size, stop_strings=(stop,) if stop else ())
    return [Request(prompt_id="p", prompt=PROMPT, sampling=sampling, sample=i) for i in range(num)]


def group_of(rollouts: Sequence[Rollout]) -> Group:
    ordered = sorted(rollouts, key=lambda rollout: rollout.sample)
    rewarded = tuple(replace(rollout, reward=float(i)) for i, rollout in enumerate(ordered))
    return Group(prompt=Prompt(prompt_id="p", tokens=PROMPT), rollouts=rewarded)


def assert_as_computed(llm: StandIn, rollout: Rollout) -> None:
    """Assert that a rollout has the routes of its tokens but the last, in the layers with experts."""
    assert rollout.routed_experts is not None
    _, expected = computed(llm.model, [*PROMPT.tolist(), *rollout.tokens.tolist()])
    assert rollout.routed_experts.tolist() == expected[:-1].tolist()


def gradients(model: Any, rollouts: Sequence[Rollout], max_tokens: int | None) -> dict[str, torch.Tensor]:
    """Return the gradients of the training batch of one group."""
    batch = make_rl_batch([group_of(rollouts)], estimator="grpo", layout="tree")
    backward(model, batch.trees.forests, sft(batch.trees.loss_masks, normalizer="constant", divisor=1.0), max_tokens)
    return take_gradients(model)


def flat_gradients(model: Any, rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """Return the gradients of the rollouts as separate sequences, with the experts that `computed` names."""
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        assert rollout.routed_experts is not None
        with told(model) as routers:
            for layer, router in enumerate(routers):
                # Nothing is trained by the last token's output.
                router.told = [*rollout.routed_experts[:, layer].tolist(), [0, 1]]
            sequence = [*PROMPT.tolist(), *rollout.tokens.tolist()]
            total = total - flat_logprobs(model, sequence)[0][PROMPT.size - 1 :].sum()
    total.backward()  # type: ignore[no-untyped-call]
    return take_gradients(model)


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_gradients_of_rollouts_are_those_of_flat_replay(llm: StandIn, model: Any, max_tokens: int | None) -> None:
    rollouts = list(VLLMEngine(llm, model).generate(requests()))
    for rollout in rollouts:
        assert_as_computed(llm, rollout)
    expected = flat_gradients(model, rollouts)
    assert_gradients_equal(gradients(model, rollouts, max_tokens), expected, 1e-10)
    # The law fails for routes one position off, and for none.
    for broken in (lambda routes: np.roll(routes, 1, axis=0), lambda _routes: None):
        wrong = [replace(rollout, routed_experts=broken(rollout.routed_experts)) for rollout in rollouts]
        with pytest.raises(AssertionError):
            assert_gradients_equal(gradients(model, wrong, max_tokens), expected, 1e-3)


def test_a_stop_string_ends_the_routes_with_the_tokens(llm: StandIn, model: Any) -> None:
    whole = list(VLLMEngine(llm, model).generate(requests(1)))
    llm.noise.manual_seed(0)
    stop = letters(whole[0].tokens[2:4])
    (rollout,) = VLLMEngine(llm, model, decode=letters).generate(requests(1, stop=stop))
    assert rollout.finish_reason == "stop"
    assert rollout.num_tokens < 6
    assert_as_computed(llm, rollout)


def test_an_interrupted_rollout_keeps_its_routes_and_goes_on_with_those_of_all_its_tokens(
    llm: StandIn, model: Any
) -> None:
    engine = VLLMEngine(llm, model)
    engine.submit(requests(2))
    for _ in range(3):
        engine.step()
    (aborted,) = engine.abort([("p", 0, 0)])
    assert aborted.num_tokens == 3
    assert_as_computed(llm, aborted)
    with torch.no_grad():
        model.lm_head.weight += 0.1
        for weight in llm.model.parameters():
            weight += 0.05
    engine.update_weights(1, "reprefill")
    engine.submit([replace(requests(1)[0], so_far=aborted)])
    rollouts = []
    while engine.num_unfinished:
        rollouts += engine.step()
    assert sorted(rollout.num_tokens for rollout in rollouts) == [6, 6]
    for rollout in rollouts:
        assert_as_computed(llm, rollout)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda routes: routes[1:],
        lambda routes: np.concatenate([routes, routes[:1]]),
        lambda routes: routes[:, :2],
        lambda routes: routes[:, 0],
        lambda routes: None,
    ],
)
def test_routes_that_do_not_fit_are_refused_with_their_rollout(llm: StandIn, model: Any, spoil: Any) -> None:
    llm.spoil = spoil
    with pytest.raises(StateError, match=r"must return routed_experts \[10, 3, experts per token\].*\('p', 0, 0\)"):
        list(VLLMEngine(llm, model).generate(requests(1)))


def test_other_rows_than_tokens_are_refused_in_a_batch(llm: StandIn, model: Any) -> None:
    rollouts = list(VLLMEngine(llm, model).generate(requests(2)))
    short = [replace(rollout, routed_experts=rollout.routed_experts[2:]) for rollout in rollouts]
    with pytest.raises(InputError, match="prompt 'p', sample 0: routed_experts must be integers"):
        make_rl_batch([group_of(short)], estimator="grpo", layout="tree")
    with pytest.raises(InputError, match="one row per token"):
        replace(rollouts[0], routed_experts=rollouts[0].routed_experts[:3])


def test_an_observation_and_a_branch_drop_routes(llm: StandIn, model: Any) -> None:
    (rollout,) = VLLMEngine(llm, model).generate(requests(1))
    assert rollout.observe(np.array([3])).routed_experts is None
    assert rollout.branch(2, sample=5).routed_experts is None


def test_the_rollout_log_leaves_routes_out(llm: StandIn, model: Any) -> None:
    group = group_of(list(VLLMEngine(llm, model).generate(requests(2))))
    assert group.rollouts[0].routed_experts is not None
    assert [logged.routed_experts for logged in as_trajectories([group], epoch=0, step=1)] == [None, None]


def test_a_branch_of_an_episode_has_the_routes_of_its_last_call(llm: StandIn, model: Any) -> None:
    engine = VLLMEngine(llm, model)
    (first,) = engine.generate(requests(1, size=2))
    context = np.concatenate([PROMPT, first.tokens, np.array([3], np.int32)])
    (second,) = engine.generate([replace(requests(1)[0], prompt=context)])
    calls = [
        Call(number=0, agent="a", context=PROMPT, rollout=first),
        Call(number=1, agent="a", context=context, rollout=second),
    ]
    (branch,) = branches_of(calls)
    assert branch.routed_experts is second.routed_experts
    assert second.routed_experts is not None
    assert len(second.routed_experts) == branch.tokens.size - 1


def test_without_the_llm_s_flag_rollouts_have_no_routes(llm: StandIn, model: Any) -> None:
    llm.vllm_config.aux_output_config.enable_return_routed_experts = False
    assert routed_layers(llm.vllm_config, model) is None
    (rollout,) = VLLMEngine(llm, model).generate(requests(1))
    assert rollout.routed_experts is None


def test_experts_on_vllm_s_cpu_build_are_refused(llm: StandIn) -> None:
    llm.vllm_config.device_config.device_type = "cpu"
    llm.vllm_config.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(UnsupportedError, match="computes updated experts wrongly"):
        VLLMEngine(llm, build("qwen3_moe", **SHAPE))


def test_steps_of_a_loop_replay_the_routes_of_its_rollouts(llm: StandIn) -> None:
    def trained(*, has_routes: bool) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        llm.noise.manual_seed(0)
        llm.vllm_config.aux_output_config.enable_return_routed_experts = has_routes
        model = build_float64("qwen3_moe", **SHAPE)
        loop = scripted_loop(
            model, make_engine=lambda _drafter, version: VLLMEngine(llm, model, version=version), rehearse="off"
        )
        loop.step()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        return [one.tokens.tolist() for one in loop.latest if one.tokens is not None], weights

    tokens, replayed = trained(has_routes=True)
    same_tokens, chosen = trained(has_routes=False)
    assert tokens == same_tokens
    assert any(not torch.allclose(replayed[name], chosen[name], rtol=0, atol=1e-6) for name in chosen)


class Started(NamedTuple):
    """What an LLM was started with."""

    settings: dict[str, Any]
    runner: str


def started(
    monkeypatch: pytest.MonkeyPatch, family: str, *, is_cpu: bool, drafts: DraftsInVLLM | None = None
) -> Started:
    """Return what `make_llm` starts an LLM with, on a platform that need not be here."""
    found: list[Started] = []

    class LLM:
        def __init__(self, _folder: str, **settings: Any) -> None:
            found.append(Started(settings, os.environ["VLLM_USE_V2_MODEL_RUNNER"]))

    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setitem(sys.modules, "vllm", cast("Any", SimpleNamespace(LLM=LLM, platforms=platforms)))
    monkeypatch.setitem(sys.modules, "vllm.platforms", cast("Any", platforms))
    monkeypatch.setattr(llm_module, "require", lambda *_: None)
    settings = LLMSettings(max_batch=2, max_model_len=64, num_slots=128, dtype="float32", drafts=drafts)
    make_llm(build(family), settings)
    return found[0]


def test_an_llm_of_experts_returns_routes_where_vllm_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = started(monkeypatch, "qwen3_moe", is_cpu=False)
    assert (asked.settings["enable_return_routed_experts"], asked.runner) == (True, "1")
    # Drafts of ours need V1, which returns none.
    drafts = DraftsInVLLM(history=tmp_path, max_draft=4)
    for other in (
        started(monkeypatch, "qwen3_moe", is_cpu=False, drafts=drafts),
        started(monkeypatch, "qwen3", is_cpu=False),
        started(monkeypatch, "qwen3", is_cpu=True),
    ):
        assert ("enable_return_routed_experts" in other.settings, other.runner) == (False, "0")
    with pytest.raises(UnsupportedError, match="computes updated experts wrongly"):
        started(monkeypatch, "qwen3_moe", is_cpu=True)
