"""The checkpoint that vLLM loads has each weight that the model computes with. Does not need vLLM."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.engine.test_adapters import CONFIGS, adapted
from tests.models import build
from treering.errors import UnsupportedError
from treering.integrations.vllm import llm
from treering.integrations.vllm.llm import checkpoint_of, fingerprint


def loaded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with checkpoint_of(model) as folder:
        found = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert not folder.exists()
    assert sum(map(len, found)) == len({name for part in found for name in part})
    return {name: weight for part in found for name, weight in part.items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_checkpoint_is_the_state_of_the_model_with_its_head(family: str) -> None:
    model = build(family)
    assert "lm_head.weight" in model.state_dict()
    assert_equal(loaded(model), model.state_dict())


def test_a_tied_head_is_written_too() -> None:
    model = build("qwen3", tie_word_embeddings=True)
    found = loaded(model)
    assert found["lm_head.weight"].equal(found["model.embed_tokens.weight"])
    with checkpoint_of(model, has_tied_head=False) as folder:
        (file,) = folder.iterdir()
        assert load_file(file).keys() == found.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("name", CONFIGS)
def test_lora_is_merged_as_peft_merges_it(name: str) -> None:
    model = adapted(name)
    before = fingerprint(model)
    found = loaded(model)
    assert fingerprint(model) == before
    copied: PeftModel = copy.deepcopy(model)
    assert_equal(found, copied.merge_and_unload().state_dict())


def test_a_large_model_is_written_in_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_MAX_FILE_BYTES", 5000)
    model = build("qwen3")
    with checkpoint_of(model) as folder:
        assert len(list(folder.iterdir())) > 3
    assert_equal(loaded(model), model.state_dict())


def test_a_fingerprint_changes_with_any_weight() -> None:
    model = build("qwen3")
    seen = {fingerprint(model)}
    with torch.no_grad():
        for weight in model.parameters():
            weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0))
            seen.add(fingerprint(model))
        num_weights = len(list(model.parameters()))
        assert len(seen) == num_weights + 1
        norm = model.model.norm.weight
        norm[0], norm[1] = 2.0, 3.0
        seen.add(fingerprint(model))
        norm[0], norm[1] = 3.0, 2.0
        seen.add(fingerprint(model))
    assert len(seen) == num_weights + 3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_written_one_by_one_as_they_are_saved(family: str, tmp_path: Path) -> None:
    model = build(family)
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    assert_equal(loaded(model), load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        next(weight for weight in model.parameters() if weight.ndim > 2)[1, 2, 3] += 1
    assert fingerprint(model) != before


def test_lora_is_merged_next_to_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(build("qwen3_moe"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    found = loaded(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    assert_equal(found, load_file(tmp_path / "model.safetensors"))


def test_experts_that_stay_in_one_tensor_and_their_adapters_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"experts one by one, but .* stays one tensor"):
        loaded(build("gpt_oss"))
    config = LoraConfig(target_parameters=["mlp.experts.down_proj"], target_modules=["q_proj"])
    with pytest.raises(UnsupportedError, match=r"LoRA of experts \(target_parameters\)"):
        loaded(get_peft_model(build("qwen3_moe"), config))
