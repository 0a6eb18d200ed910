"""LoRA in the loop trains only adapters that PEFT loads, with PEFT's gradients, and resumes bitwise."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from tests.train.loop.runs import assert_bitwise_equal, store, tensors_of, tiny_loop
from treering.config.model import LoraOptions
from treering.errors import ConfigError, UnsupportedError
from treering.model.forward import forward
from treering.model.layers import enable_gradient_checkpointing
from treering.objectives import sft
from treering.train.loop.lora_adapters import adapter_tensors, add_lora, base_checksum, save_adapter
from treering.train.step import backward
from treering.tree.forest import Forest

SEQUENCES = [[3, 4, 5, 6, 7], [3, 4, 5, 8], [3, 9, 2, 2], [3, 4, 5, 6, 1]]
OPTIONS = LoraOptions(rank=2, alpha=6)


def adapted(model: PreTrainedModel | None = None, options: LoraOptions = OPTIONS, seed: int = 0) -> PreTrainedModel:
    """Return a model with random second adapter matrices, which are initially zero and would have no effect."""
    model = build() if model is None else model
    torch.manual_seed(seed)
    add_lora(model, options, base="org/tiny", revision="a" * 40)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("mode", ["none", "reentrant", "non_reentrant"])
def test_gradients_are_those_of_flat_peft_on_the_stored_adapter(
    tmp_path: Path, mode: str, max_tokens: int | None
) -> None:
    model = adapted(build_float64()).double()
    save_adapter(model, adapter_tensors(model, model.state_dict()), tmp_path)
    # PEFT loads the file in the dtype of its model, here float64.
    peft = PeftModel.from_pretrained(
        build_float64(), tmp_path, is_trainable=True, autocast_adapter_dtype=False
    ).double()
    for sequence in SEQUENCES:
        (-flat_logprobs(peft, sequence)[0].sum()).backward()
    expected = {name.removeprefix("base_model.model."): grad for name, grad in take_gradients(peft).items()}
    assert all(float(grad.norm()) > 0 for grad in expected.values())
    enable_gradient_checkpointing(model.train(), mode)
    backward(model, Forest.from_sequences(SEQUENCES), sft(normalizer="sum"), max_tokens)
    assert_gradients_equal(take_gradients(model), expected, 1e-10)


def test_peft_loads_a_checkpoint_as_the_model_that_was_trained(tmp_path: Path) -> None:
    loop = tiny_loop(adapted())
    loop.step()
    folder = store(tmp_path).save(loop)
    stored = load_file(folder / "adapter_model.safetensors")
    assert set(stored) == {
        f"base_model.model.{name.replace('.default', '')}"
        for name, w in loop.model.named_parameters()
        if w.requires_grad
    }
    assert not (folder / "model.safetensors").exists()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", "a" * 40)
    assert (settings["r"], settings["lora_alpha"], settings["inference_mode"]) == (2, 6, True)
    loaded = PeftModel.from_pretrained(build(), folder)
    forest = Forest.from_sequences(SEQUENCES)
    with torch.no_grad():
        ours, theirs = (forward(model.eval(), forest).logprobs for model in (loop.model, loaded))
    assert torch.equal(ours, theirs)


def test_a_resumed_run_of_adapters_is_bitwise(tmp_path: Path) -> None:
    loop = tiny_loop(adapted())
    for _ in range(3):
        loop.step()
    store(tmp_path).save(loop)
    other = tiny_loop(adapted(seed=5))
    assert store(tmp_path).restore_newest(other) == 3
    assert_bitwise_equal(tensors_of(other), tensors_of(loop))
    loop.step(), other.step()
    assert_bitwise_equal(tensors_of(other), tensors_of(loop))


def test_the_same_adapter_is_stored_as_the_same_bytes(tmp_path: Path) -> None:
    model = adapted()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_adapter(model, adapter_tensors(model, model.state_dict()), tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    targets = json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)


def test_all_linear_modules_but_the_head_get_adapters_unless_some_are_named() -> None:
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    named = LoraOptions(rank=2, alpha=2, target_modules=("v_proj", "o_proj"))
    for options, expected in ((OPTIONS, modules), (named, {"v_proj", "o_proj"})):
        model = adapted(options=options)
        found = {name.split(".lora_")[0].rpartition(".")[2] for name, w in model.named_parameters() if w.requires_grad}
        assert found == expected


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens"])
def test_a_module_that_the_model_lacks_is_refused_with_those_that_it_has(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"got '{name}'; Qwen3ForCausalLM has down_proj, gate_proj"):
        adapted(options=LoraOptions(rank=2, alpha=2, target_modules=("q_proj", name)))


def test_releases_that_do_not_go_together_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "999")
    with pytest.raises(UnsupportedError, match=r"cannot add adapters of PEFT .*version >= 999.*; install versions"):
        adapted()


def test_a_checkpoint_that_would_lose_a_trained_weight_is_refused(tmp_path: Path) -> None:
    loop = tiny_loop(adapted())
    loop.model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight is trained too"):
        store(tmp_path).save(loop)


def test_the_checksum_covers_only_the_base_weights() -> None:
    model, other = adapted(), adapted(seed=1)
    assert base_checksum(model) == base_checksum(other)
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 1] += 1e-6
    assert base_checksum(model) != base_checksum(other)
