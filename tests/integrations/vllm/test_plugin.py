"""The drafter inside vLLM by its contract: what is refused, how rows map to requests, and that no step fails.

Does not need vLLM.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.draft.test_request_drafter import STEPS, Engine, Step
from tests.history.reference import store_of
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.history.draft.drafter import Drafter
from treering.history.draft.request_drafter import RequestDrafter
from treering.history.store.store import HistoryStore
from treering.integrations.vllm import HistoryProposer, WorkerExtension, record, request_args
from treering.integrations.vllm.draft_session import ContentRows, DraftGate, DraftSession, PromptTable, RunnerRows
from treering.integrations.vllm.exact_sampling import install
from treering.integrations.vllm.plugin import hide_llvmlite, unpacked, wrap_runner
from treering.integrations.vllm.vllm_settings import PluginSettings, read_request_args, read_settings
from treering.types import hash_of_prompt


def vllm_config(*, num_drafts: int = 4, is_async: bool = False, is_v2: bool = False) -> Any:
    """Return the fields of a `VllmConfig` that the proposer reads."""
    model = SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 50)
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=num_drafts, draft_model_config=model),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        use_v2_model_runner=is_v2,
    )


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_clock: Path) -> Any:
    """A proposer with a history of the prompt [5, 6]."""
    with HistoryStore(tmp_path) as store:
        store.add(hash_of_prompt([5, 6]), [np.array([1, 2, 3, 4, 7, 8], np.int32)] * 2, 0)
        store.publish()
    monkeypatch.setenv("TREERING_HISTORY", str(tmp_path))
    monkeypatch.setenv("TREERING_VLLM_CONFIG", str(without_clock))
    made = HistoryProposer(vllm_config())
    made.load_model()
    yield made
    made.session.close()


def buffer(*lines: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return counts and tokens as vLLM's contract has them."""
    tokens = np.full((8, 32), 49, np.int32)
    for b, line in enumerate(lines):
        tokens[b, : len(line)] = line
    return np.array([*map(len, lines), *[0] * (8 - len(lines))], np.int32), tokens


def test_the_package_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys; import treering.integrations.vllm as v; v.register, v.HistoryProposer, v.request_args; "
        "print([name for name in ('torch', 'numba', 'vllm') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_v2": True}, "selects Model Runner V2.*set VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"is_async": True}, "got async_scheduling=True; set --no-async-scheduling"),
        ({"num_drafts": 65}, "drafts 1 to 64 tokens, got num_speculative_tokens=65"),
    ],
)
def test_what_vllm_could_not_draft_with_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        HistoryProposer(vllm_config(**options))


def test_settings_are_read_from_two_variables(tmp_path: Path) -> None:
    file = tmp_path / "drafts.toml"
    file.write_text('min_acceptance = 0.1\nsources = ["history"]\n')
    found = read_settings({"TREERING_HISTORY": "runs/history", "TREERING_VLLM_CONFIG": str(file)})
    assert found == PluginSettings(history=Path("runs/history"), min_acceptance=0.1, sources=("history",))
    assert found.drafter_options() == {"min_acceptance": 0.1, "sources": ("history",)}
    assert read_settings({}) == PluginSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_aceptance = 0.1", "unknown key 'min_aceptance', nearest is 'min_acceptance'"),
        ("x = 1\nmin_gain = true", "unknown key 'x', known are .*; min_gain is a number, got True"),
        ("sources = [1]", r"sources is a list of texts, got \[1\]"),
        ("max_live_tokens = true", "max_live_tokens is a whole number, got True"),
        ("min_gain = -1", "min_gain is 0 or more, got -1"),
        ("refresh_interval_s = -1", "refresh_interval_s is 0 or more, got -1"),
        ("=", "names a TOML file .* cannot be read"),
    ],
)
def test_an_unknown_or_wrong_setting_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "drafts.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings({"TREERING_VLLM_CONFIG": str(file)})


def test_a_runner_with_another_signature_is_left_alone_with_a_warning() -> None:
    class Runner:
        def propose_draft_token_ids(self, scheduler_output: Any, sampled: Any) -> Any:
            return "drafts"

        def _sample(self, logits: Any) -> Any:
            return "tokens"

    with (
        pytest.warns(UserWarning, match="requests are told apart by their tokens, because Runner"),
        pytest.warns(UserWarning, match="steps without drafts are verified as if they had some, because Runner"),
    ):
        assert not wrap_runner(Runner)
    assert (Runner().propose_draft_token_ids(None, None), Runner()._sample(None)) == ("drafts", "tokens")
    with pytest.warns(UserWarning, match="takes nothing instead of"):
        assert not wrap_runner(object)


def test_a_runner_is_wrapped_once_and_reports_only_to_this_drafter(proposer: Any) -> None:
    class Runner:
        drafter: Any = None

        def propose_draft_token_ids(
            self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, hidden_states: Any,
            sample_hidden_states: Any, aux_hidden_states: Any, spec_decode_metadata: Any, common_attn_metadata: Any,
            slot_mappings: Any,
        ) -> Any:  # fmt: skip
            return "drafts"

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
            return logits, spec_decode_metadata

    assert wrap_runner(Runner)
    wrapped = Runner.propose_draft_token_ids, Runner._sample
    assert wrap_runner(Runner)
    assert (Runner.propose_draft_token_ids, Runner._sample) == wrapped
    runner = Runner()
    assert runner.propose_draft_token_ids("step", *[None] * 8) == "drafts"
    empty, full = SimpleNamespace(num_draft_tokens=[0, 0]), SimpleNamespace(num_draft_tokens=[0, 3])
    assert [runner._sample("logits", metadata)[1] for metadata in (None, empty, full)] == [None, empty, full]
    runner.drafter = proposer
    assert runner.propose_draft_token_ids("step", *[None] * 7, slot_mappings=None) == "drafts"
    assert proposer._step == (runner, "step")
    # Without drafts, the step runs as it does without a drafter.
    assert [runner._sample("logits", metadata)[1] for metadata in (None, empty, full)] == [None, None, full]


@pytest.mark.parametrize(("num_accepted", "pays"), [(0, False), (3, False), (4, True)])
def test_where_drafts_gain_too_little_one_step_in_16_looks_for_them_until_history_is_news(
    num_accepted: int, pays: bool
) -> None:
    gate, total, history = DraftGate(1 / 16), 0, dict[Any, Any]()

    def looks(num_steps: int, gain: int, known: Any) -> str:
        nonlocal total
        said = ""
        for _ in range(num_steps):
            said += "-a"[gate.is_due(known)]
            if said[-1] == "a":
                gate.note(64, total)
                total += gain
        return said

    # 512 rows are judged; the gain of a look is known at the next one.
    assert looks(41, num_accepted, history) == ("a" * 41 if pays else "a" * 9 + ("-" * 15 + "a") * 2)
    assert looks(8, num_accepted, {}) == "a" * 8
    if not pays:
        assert looks(200, 64, {**history})[-16:] == "a" * 16


def test_steps_that_do_not_look_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DraftSession(PluginSettings(), max_draft=4, max_model_len=32, vocab_size=50)
    monkeypatch.setattr(made.requests, "propose", lambda names, *_: [[7]] * len(names))
    counts, tokens = buffer(*[[5, 6, b] for b in range(8)])
    drafts = [made.propose([[b] for b in range(8)], counts, tokens, None) for _ in range(100)]
    # 64 looks are 512 rows, which gained nothing; then three steps of 36 look.
    assert (drafts.count([[7]] * 8), drafts.count([[]] * 8)) == (67, 33)


def test_drafts_come_by_the_contract_alone_and_fit_the_longest_length(proposer: Any) -> None:
    counts, tokens = buffer([5, 6, 1], [5, 6, 1, 2], [9, 9, 9])
    assert proposer.propose([[1], [1, 2], []], counts, tokens)[:2] == [[2, 3, 4, 7], [3, 4, 7, 8]]
    # A step computes the newest token and its drafts, and gains one more than it accepts: 29 + 2 + 1 are 32.
    counts, tokens = buffer([*range(10, 37), 5, 6, 1][1:], [*range(10, 39), 5, 6, 1][1:])
    lists = proposer.propose([[1], [1]], counts, tokens)
    assert [len(draft) <= 32 - 1 - size for draft, size in zip(lists, counts.tolist(), strict=False)] == [True, True]
    assert proposer.num_failures == 0


def test_the_guard_of_vllm_never_skips_this_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(num_drafts=6)
    model = config.model_config
    HistoryProposer(config)
    # vLLM drafts while its longest row and K more tokens fit this length, and no row is longer than the model's limit.
    assert model.max_model_len + 6 <= config.speculative_config.draft_model_config.max_model_len
    assert model.max_model_len == 32


def test_a_failure_warns_once_drafts_nothing_and_ends(proposer: Any) -> None:
    counts, tokens = buffer([5, 6, 1])
    with pytest.warns(UserWarning, match="drafting failed"):
        assert proposer.propose([[1]], counts, tokens[:, :2]) == [[]]
    # An unexpected warning fails the test.
    assert proposer.propose([[1]], None, tokens) == [[]]
    assert proposer.num_failures == 2
    assert proposer.propose([[1]], counts, tokens) == [[2, 3, 4, 7]]
    longer = buffer([5, 6, 1, 2, 3, 9])
    proposer.propose([[2, 3, 9]], *longer)
    assert proposer.propose([[1]], None, tokens) == [[]]
    requests = proposer.session.requests
    assert (requests.num_drafted, requests.num_accepted) == (4, 2)


def test_the_longest_prompt_that_a_row_begins_with_is_its_prompt() -> None:
    table, ids = PromptTable(), lambda *tokens: np.array(tokens, np.int32)
    table.add(ids(5, 6), "short")
    table.add(ids(5, 6, 7, 8), "long")
    assert table.find(ids(5, 6, 7, 8, 9), ()) == ("long", 4)
    assert table.find(ids(5, 6, 7, 9), ()) == ("short", 2)
    whole = hash_of_prompt([5, 6, 7, 9])
    assert table.find(ids(5, 6, 7, 9), {whole}) == (whole, 4)
    # A new prompt gets its own id, and is found again at the start of a rollout.
    assert table.find(ids(1, 2), ()) == (hash_of_prompt([1, 2]), 2)
    assert table.find(ids(1, 2, 3), ()) == (hash_of_prompt([1, 2]), 2)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 2**32))
def test_a_row_keeps_its_name_and_its_prompt_wherever_it_moves(steps: list[Step], seed: int) -> None:
    requests = RequestDrafter(Drafter(store_of({}), shape="chain"))
    rows, engine = ContentRows(requests, PromptTable()), Engine(seed)
    before: dict[str, tuple[int, ...]] = {}
    for step in steps:
        sizes = {request.name: len(request.tokens) for request in engine.lines}
        engine.sample()
        engine.turn_over(step)
        for request in engine.lines:
            # Every prompt is prefilled and has its first token at once.
            if request.num_done == 0:
                request.num_done = 1
        engine.show()
        was_here = [sizes.get(r.name, len(r.tokens) - min(r.num_done, 1)) for r in engine.lines]
        sampled = [list(r.tokens[size:]) for r, size in zip(engine.lines, was_here, strict=True)]
        counts = np.array([len(r.tokens) for r in engine.lines] + [0], np.int32)
        names = rows.names(sampled, engine.tokens, counts, ())
        assert len(set(names)) == len(names)
        for request, name, size in zip(engine.lines, names, was_here, strict=True):
            # A name continues exactly the tokens that it had.
            assert request.tokens[:size] == before.get(name, request.tokens[:size])
        # A row that stayed keeps its name, or a row with the same tokens that came back has it.
        assert sum(name in before for name in names) >= sum(request.name in sizes for request in engine.lines)
        before = {name: r.tokens for r, name in zip(engine.lines, names, strict=True)}
        assert set(requests._requests) == set(names)


def test_rows_of_the_runner_end_by_their_own_limit_and_are_known_by_their_args() -> None:
    requests, prompts = RequestDrafter(Drafter(store_of({}), shape="chain")), PromptTable()
    rows = RunnerRows(requests, prompts)
    params = [
        SimpleNamespace(extra_args=request_args("q", 2, num_prompt_tokens=2), max_tokens=10, min_tokens=4),
        SimpleNamespace(extra_args={"treering": "garbage"}, max_tokens=None, min_tokens=0),
        SimpleNamespace(extra_args=request_args("q", 2, num_prompt_tokens=0), max_tokens=10, min_tokens=0),
        SimpleNamespace(extra_args=as_text(request_args(None, rehearsed=[3, 4])), max_tokens=10, min_tokens=0),
    ]
    tokens = np.array([[5, 6, 1], [5, 6, 2], [7, 8, 9], [5, 6, 3]], np.int32)
    batch = SimpleNamespace(req_ids=[*"abcd"], token_ids_cpu=tokens, num_prompt_tokens=np.array([3, 3, 3, 3]))
    runner = SimpleNamespace(
        input_batch=batch,
        requests={
            name: SimpleNamespace(sampling_params=p, num_prompt_tokens=3)
            for name, p in zip("abcd", params, strict=True)
        },
    )
    names = rows.names(runner, SimpleNamespace(finished_req_ids=set()), ())
    assert names == ["a", "b", "c", "d"]
    assert rows.ends[0] == 13
    assert rows.ends[1] > 1 << 40
    assert rows.first_ends.tolist() == [7, 0, 0, 0]
    # The second request has no arguments and begins with the first one's original prompt; the third is an episode's
    # call; the fourth has no id.
    assert [requests._requests[name].prompt_id for name in names] == ["q"] * 4
    assert [requests._requests[name].num_prompt_tokens for name in names] == [2, 2, 0, 2]
    assert {name: (begin, tokens.tolist()) for name, (begin, tokens) in rows.rehearsed.items()} == {"d": (3, [3, 4])}
    batch.req_ids = ["b"]
    assert rows.names(runner, SimpleNamespace(finished_req_ids={"a", "c", "d"}), ()) == ["b"]
    assert "a" not in requests
    assert not rows.rehearsed


def as_text(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as requests over HTTP have them."""
    return {name: json.dumps(value) for name, value in args.items()}


def test_identities_come_back_as_they_were_given_and_wrong_ones_are_refused() -> None:
    for prompt_id, draw, size in ((1.5, 0, 1), ("q", -1, 1), ("q", True, 1), ("q", 0, -1)):
        with pytest.raises(InputError):
            request_args(prompt_id, draw, num_prompt_tokens=size)
    for size in (0, 7):
        assert read_request_args(request_args("q", 2, num_prompt_tokens=size)) == ("q", 2, size, ())
    assert read_request_args({"other": 1, **request_args(5)}) == (5, 0, None, ())
    for args in (request_args("q", rehearsed=[7, 8]), as_text(request_args("q", rehearsed=[7, 8]))):
        assert read_request_args(args) == ("q", 0, None, [7, 8])
    assert read_request_args(request_args(None, rehearsed=[7, 8])) == (None, 0, None, [7, 8])
    for unknown in (None, {}, {"treering": 3}, {"treering": "{"}, {"treering": {"prompt_id": 1.5, "draw": 0}}):
        assert read_request_args(unknown) is None


def test_outputs_are_recorded_under_their_prompts() -> None:
    completion = [SimpleNamespace(token_ids=tokens) for tokens in ([1, 2], [3])]
    outputs = [SimpleNamespace(prompt_token_ids=[5, 6], outputs=completion)]
    store = HistoryStore()
    record(store, outputs, version=4)
    record(store, outputs, version=4, prompt_ids=["q"])
    store.publish()
    assert {key: index.text.tolist() for key, index in store.snapshot.items()} == {
        hash_of_prompt([5, 6]): [-1, 1, 2, -1, 3],
        "q": [-1, 1, 2, -1, 3],
    }
    with pytest.raises(InputError, match="got 2 for 1 outputs"):
        record(store, outputs, version=4, prompt_ids=["q", "r"])
    with pytest.raises(InputError, match="no token ids to hash; pass prompt_ids"):
        record(store, [SimpleNamespace(prompt_token_ids=None, outputs=completion)], version=4)


def test_what_was_learnt_travels_as_bytes(proposer: Any) -> None:
    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(drafter=proposer)
    counts, tokens = buffer([5, 6, 1])
    assert proposer.propose([[1]], counts, tokens) == [[2, 3, 4, 7]]
    counts, tokens = buffer([5, 6, 1, 2, 3, 9])
    proposer.propose([[2, 3, 9]], counts, tokens)
    stats = extension.treering_stats()
    assert (stats["num_drafted"], stats["num_accepted"], stats["num_prompts"]) == (4, 2, 1)
    state = extension.treering_state()
    extension.treering_load_state(state)
    again = unpacked(extension.treering_state())
    assert all(np.array_equal(again[name], values) for name, values in unpacked(state).items())
    assert not extension.treering_refresh()
    extension.model_runner = SimpleNamespace(drafter=None)
    with pytest.raises(StateError, match="this worker drafts with NoneType"):
        extension.treering_stats()


def test_a_worker_starts_without_the_module_of_numba_on_which_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llvmlite.binding.ffi"
    module, seen = ModuleType(name), list[Any]()
    monkeypatch.setitem(sys.modules, name, module)

    def rebind(kernels: Any) -> None:
        seen.append((kernels, name in sys.modules))
        raise RuntimeError("as at a failed start")

    dispatcher = SimpleNamespace(_rebind_kernels=rebind)
    hide_llvmlite(dispatcher)
    # vLLM calls a plugin more than once in a process.
    hide_llvmlite(dispatcher)
    with pytest.raises(RuntimeError, match="failed start"):
        dispatcher._rebind_kernels([1])
    assert seen == [([1], False)]
    assert sys.modules[name] is module


@pytest.mark.parametrize(
    ("device", "is_invariant", "problem"),
    [
        ("cuda", False, "on cuda a token's logits depend on the batch; set VLLM_BATCH_INVARIANT=1"),
        ("xpu", True, "on xpu a token's logits depend on the batch"),
        # The next check, of vLLM's sampler.
        ("cuda", True, "RejectionSampler.forward takes"),
        ("cpu", False, "RejectionSampler.forward takes"),
    ],
)
def test_exact_verification_on_a_gpu_needs_batch_invariance(
    device: str, is_invariant: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "vllm": SimpleNamespace(envs=SimpleNamespace(VLLM_BATCH_INVARIANT=is_invariant)),
        "vllm.v1.sample": SimpleNamespace(rejection_sampler=SimpleNamespace()),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    runner = SimpleNamespace(device=SimpleNamespace(type=device), rejection_sampler=SimpleNamespace())
    assert problem in (install(runner, "exact") or "")
