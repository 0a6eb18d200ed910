"""verl's settings for drafts, prompt names that last across epochs, and a batch of verl in a history."""

import pytest

from treering.errors import ConfigError, InputError
from treering.history.store.store import HistoryStore
from treering.integrations.verl import prompt_key, record_batch, with_history_drafts
from treering.types import hash_of_prompt


def test_drafts_are_added_and_every_other_setting_stays() -> None:
    given = {"vllm": {"enable_prefix_caching": True}, "sglang": {"x": 1}}
    merged = with_history_drafts(given, max_draft=8)
    assert merged["sglang"] == {"x": 1}
    assert merged["vllm"]["enable_prefix_caching"] is True
    assert merged["vllm"]["async_scheduling"] is False
    assert merged["vllm"]["speculative_config"] == {
        "method": "custom_class",
        "model": "treering.integrations.vllm.HistoryProposer",
        "num_speculative_tokens": 8,
    }
    assert given == {"vllm": {"enable_prefix_caching": True}, "sglang": {"x": 1}}
    assert with_history_drafts(merged, max_draft=8) == merged


@pytest.mark.parametrize(
    ("vllm", "max_draft", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, 16, "vLLM has one source of drafts"),
        ({"async_scheduling": True}, 16, "async_scheduling=True begins a step earlier"),
        ({}, 65, "max_draft must be 1 to 64, got 65"),
    ],
)
def test_settings_that_contradict_drafts_are_refused(vllm: dict[str, object], max_draft: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_history_drafts({"vllm": vllm}, max_draft=max_draft)


def test_a_prompt_is_named_by_its_place_in_the_dataset_and_not_by_verls_uid() -> None:
    first, second = ({"uid": uid, "data_source": "gsm8k", "extra_info": {"index": 7}} for uid in ("a", "b"))
    assert prompt_key(first) == prompt_key(second) == "gsm8k/7"
    with pytest.raises(InputError, match=r"extra_info\.index"):
        prompt_key({"uid": "a", "extra_info": {}})


def test_responses_stand_under_the_prompts_that_the_drafter_finds_by_their_tokens() -> None:
    store = HistoryStore(max_bytes=2**20)
    record_batch(store, [[1, 2], [1, 2], [3]], [[4, 5], [6], [7]], version=2)
    record_batch(store, [[3]], [[8]], version=2, prompt_ids=["q"])
    store.publish()
    assert {key: index.text.tolist() for key, index in store.snapshot.items()} == {
        hash_of_prompt([1, 2]): [-1, 4, 5, -1, 6],
        hash_of_prompt([3]): [-1, 7],
        "q": [-1, 8],
    }
    with pytest.raises(InputError, match=r"must have the same length, got \[1, 2\]"):
        record_batch(store, [[1]], [[2], [3]], version=0)
    with pytest.raises(InputError, match=r"must have the same length, got \[1, 1, 2\]"):
        record_batch(store, [[1]], [[2]], version=0, prompt_ids=["a", "b"])
