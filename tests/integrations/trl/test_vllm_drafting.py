"""What `vllm_drafts` refuses, records and logs around a trainer's batches, without a vLLM."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make trl-test")

import transformers
from trl import GRPOTrainer, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration

from treering.engine.protocol import EngineStats
from treering.errors import ConfigError, StateError, UnsupportedError
from treering.history.store.history_reader import HistoryReader
from treering.integrations.trl import vllm_drafts
from treering.integrations.trl.vllm_drafting import JoinedTurns, ServerConnection, VLLMBatches, check_sampling
from treering.integrations.vllm.llm import EXTENSION
from treering.integrations.vllm.vllm_settings import PROPOSER
from treering.types import hash_of_prompt

pytestmark = pytest.mark.filterwarnings("default")


def generation(**changes: Any) -> Any:
    return SimpleNamespace(**{"mode": "colocate", "tensor_parallel_size": 1, "min_p": None, **changes})


@pytest.mark.parametrize(
    ("trainer", "changes", "message"),
    [
        (GRPOTrainer, {"tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2; set it to 1"),
        (GRPOTrainer, {"min_p": 0.1}, "min_p=0.1; remove it"),
        (SFTTrainer, {}, "GRPOTrainer and RLOOTrainer, got SFTTrainer"),
    ],
)
def test_what_drafts_do_not_go_with_is_refused_by_name(trainer: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_sampling(trainer.__new__(trainer), generation(**changes))


class Client:
    """TRL's client of a server that answers the drafter's calls."""

    base_url = "http://server"

    def __init__(self, model: str = PROPOSER, history: str = "/runs/history", problem: str | None = None) -> None:
        self.model, self.session = model, self
        self.answers = {"treering_stats": {"history": history}, "treering_verify": problem}

    def get_server_info(self) -> dict[str, Any]:
        return {"speculative_config": {"model": self.model}, "parallel_config": {"worker_extension_cls": EXTENSION}}

    def post(self, url: str, json: dict[str, Any]) -> Any:
        assert url == "http://server/collective_rpc"
        answer = {"results": [self.answers[json["method"]]]}
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: answer)


@pytest.mark.parametrize(
    ("client", "error", "message"),
    [
        (Client(model="ngram"), ConfigError, "start it with TREERING_HISTORY=/runs/history .*--speculative-config"),
        (Client(history="/elsewhere"), ConfigError, "the history /elsewhere, but this run records to /runs/history"),
        (Client(problem="vllm #55005"), UnsupportedError, "vllm #55005; start it without"),
    ],
)
def test_a_server_that_would_draft_otherwise_is_refused(client: Client, error: type, message: str) -> None:
    ServerConnection(Client(), Path("/runs/history"))
    with pytest.raises(error, match=message):
        ServerConnection(client, Path("/runs/history"))


def test_a_block_without_a_vllm_is_an_error_and_leaves_trl_as_it_was(tmp_path: Path) -> None:
    before = transformers.Trainer.__init__, VLLMGeneration._init_vllm
    with pytest.raises(StateError, match="with block, with use_vllm=True"), vllm_drafts(tmp_path):
        assert VLLMGeneration._init_vllm is not before[1]
    assert before == (transformers.Trainer.__init__, VLLMGeneration._init_vllm)


class Run:
    """A trainer, its `VLLMGeneration` and its vLLM in one; each prompt gets the completion 7 8."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = SimpleNamespace(is_main_process=True)
        self.model = SimpleNamespace(training=True)
        self._metrics: Any = {"train": defaultdict(list)}
        self.num_steps = self.num_refreshes = 0
        self.batches = VLLMBatches(self, self, self, folder)

    def _generate(self, prompts: list[list[int]]) -> str:
        self.generate(prompts=prompts)
        return "batch"

    def generate(self, prompts: list[list[int]]) -> tuple[Any, ...]:
        self.num_steps += 1
        return prompts, [[7, 8] for _ in prompts], None, None

    def refresh(self) -> None:
        self.num_refreshes += 1

    def counts(self) -> EngineStats:
        return EngineStats(num_rows=3 * self.num_steps, num_drafted=4 * self.num_steps, num_accepted=self.num_steps)


def test_a_batch_is_recorded_and_logged_and_a_resumed_run_s_is_newer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [run._generate([[5, 6], [5, 6]]) for _ in range(2)] == ["batch"] * 2
    assert run.num_refreshes == 2
    assert run._metrics["train"] == {"rollout/tokens_per_forward": [4 / 3] * 2, "rollout/acceptance": [1 / 4] * 2}
    run.batches._store.close()  # type: ignore[union-attr]
    Run(tmp_path)._generate([[5, 6]])
    index = HistoryReader(tmp_path).snapshot[hash_of_prompt([5, 6])]
    assert index.versions.tolist() == [2, 1]
    assert index.text.tolist() == [-1, 7, 8, -1, 7, 8, -1, 7, 8]


def rollouts_of(turns: JoinedTurns) -> list[tuple[object, list[int]]]:
    return [(prompt_id, tokens.tolist()) for prompt_id, tokens in turns.take()]


def test_a_later_turn_replaces_the_one_that_it_continues() -> None:
    turns, prompt = JoinedTurns(), [5, 6]
    turns.add([prompt, prompt], [[7, 1], [7, 2]])
    # The environment added 8 after the second rollout, and only that rollout continues.
    turns.add([[*prompt, 7, 2, 8]], [[9]])
    turns.add([[*prompt, 7, 2, 8, 9, 8]], [[3]])
    assert rollouts_of(turns) == [(hash_of_prompt(prompt), [7, 1]), (hash_of_prompt(prompt), [7, 2, 8, 9, 8, 3])]
    assert rollouts_of(turns) == []


def test_equal_rollouts_are_kept_and_the_next_batch_starts_again_under_the_same_ids() -> None:
    turns = JoinedTurns()
    turns.add([[5, 6], [5, 6], [4]], [[7], [7], [7]])
    first = rollouts_of(turns)
    turns.add([[5, 6], [5, 6], [4]], [[7], [7], [7]])
    assert rollouts_of(turns) == first == [(hash_of_prompt([5, 6]), [7])] * 2 + [(hash_of_prompt([4]), [7])]
