"""Model folders: a damaged one is refused in a line that names the file or the weight; no random weight is trained."""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from tests import models
from tests.cli.hub_cache import save_model
from tests.data.conftest import save_tokenizer
from treering.cli.models import build_model, find_teacher, tokenizer_note
from treering.config.model import DistillOptions, ModelConfig
from treering.data.rendering.template import ChatTemplate
from treering.errors import ConfigError, InputError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
UP = "model.layers.0.mlp.up_proj.weight"
ran: list[str] = []


class Code:
    """Object that runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return ran.append, ("code",)


def build(folder: Path) -> Any:
    return build_model(ModelConfig(device="cpu"), num_ids=32, seed=0, folder=folder)


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        build(folder)
    return str(caught.value)


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def as_pickle(folder: Path) -> Path:
    """Save the weights as a .bin in place of the safetensors file."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["one", "parts", "pickle"])
def test_a_whole_folder_gives_its_own_weights(tmp_path: Path, tied: bool, form: str) -> None:
    folder = save_model(tmp_path / "m", tied=tied, **({"max_shard_size": "3KB"} if form == "parts" else {}))
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    if form == "pickle":
        as_pickle(folder)
    found = build(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_missing_weight_is_named_and_never_random(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = edit_weights(save_model(tmp_path / "m"), lambda weights: weights.pop(UP))
    capfd.readouterr()
    assert f"{folder} does not match the Qwen3ForCausalLM" in (message := refusal(folder))
    assert f": {UP} is missing; correct config.json" in message
    assert "MISSING" not in capfd.readouterr().err
    untied = edit_weights(save_model(tmp_path / "untied", tied=False), lambda weights: weights.pop("lm_head.weight"))
    assert "lm_head.weight is missing; correct" in refusal(untied)


def test_weights_that_the_configuration_does_not_describe_are_named(tmp_path: Path) -> None:
    extra = edit_weights(save_model(tmp_path / "a"), lambda weights: weights.update(odd=torch.zeros(2)))
    assert "odd does not belong to it; correct config.json" in refusal(extra)
    more = edit_config(save_model(tmp_path / "b"), num_hidden_layers=1, layer_types=["full_attention"])
    assert "model.layers.1.input_layernorm.weight does not belong to it, and 10 more do not fit;" in refusal(more)
    shape = edit_weights(save_model(tmp_path / "c"), lambda weights: weights.update({UP: torch.zeros(3, 16)}))
    assert f"{UP} is [3, 16] instead of [16, 16]; correct" in refusal(shape)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "model.safetensors is cut or not a safetensors file"),
        ("model.safetensors", POINTER.encode(), "model.safetensors is a Git LFS pointer .* `git lfs pull`"),
        ("model.safetensors", None, "neither model.safetensors nor numbered parts with an index; fetch"),
        ("config.json", None, "has no config.json, so .*; correct model.path"),
        ("config.json", b"{", r"config.json is a JSON object, and this one cannot be read \(Exp.*fetch it again"),
        ("config.json", b"\xff{}", "config.json is a JSON object, and this one cannot be read"),
        ("config.json", b"[1]", "config.json is a JSON object, got list"),
        ("config.json", POINTER.encode(), "config.json is a Git LFS pointer"),
        ("config.json", b"{}", "has no model_type; correct"),
        ("config.json", b'{"model_type": "zzz"}', "cannot be loaded .*`zzz`.*; correct model.path"),
        ("config.json", b'{"model_type": "qwen3", "hidden_size": "x"}', "cannot be loaded .*hidden_size"),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    folder = save_model(tmp_path / "m")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    text = " ".join(refusal(folder).split())
    assert str(folder) in text
    with pytest.raises(InputError, match=f"(?s){message}"):
        build(folder)


def test_a_cut_file_is_named_whether_it_is_the_only_one_or_a_part(tmp_path: Path) -> None:
    for folder, name in (
        (save_model(tmp_path / "one"), "model.safetensors"),
        (save_model(tmp_path / "parts", max_shard_size="3KB"), "model-00002-*.safetensors"),
    ):
        (file,) = folder.glob(name)
        file.write_bytes(file.read_bytes()[:-10])
        assert f"{file} is cut or not a safetensors file" in refusal(folder)
    file.unlink()
    assert f"{file} is missing, but its folder's index names it" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    assert "has no weight_map with the file of each weight" in refusal(folder)


def test_a_pickle_of_weights_runs_no_code(tmp_path: Path) -> None:
    file = as_pickle(save_model(tmp_path / "m"))
    for content in ({"a": Code()}, b"garbage", POINTER.encode()):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        assert str(file) in refusal(file.parent)
    assert ran == []


def test_a_quantized_folder_without_its_package_is_refused(tmp_path: Path) -> None:
    folder = edit_config(save_model(tmp_path / "m"), quantization_config={"quant_method": "aqlm"})
    assert f"{folder / 'config.json'} describes weights that need a package that is not installed" in refusal(folder)


def test_other_folders_are_named_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert f"{tmp_path} has an adapter but no config.json; merge it" in refusal(tmp_path)
    assert "is not a folder" in refusal(tmp_path / "adapter_config.json")


CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel
Path({marker!r}).touch()
class Config(PreTrainedConfig):
    model_type = "own"
class Model(PreTrainedModel):
    config_class = Config
"""


@pytest.mark.parametrize("model_type", ["own", "qwen3"])
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_code_of_a_model_folder_never_runs_whatever_stdin_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, model_type: str
) -> None:
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    folder = edit_config(save_model(tmp_path / "m"), model_type=model_type, auto_map=names)
    marker = tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    if model_type == "own":
        section = DistillOptions(path=str(folder))
        teacher = partial(find_teacher, section, ModelConfig(device="cpu"), Path(), tokenizer=None)
        with pytest.raises(InputError, match="brings its own Python code, which is never run"):
            (partial(build, folder) if role == "model" else teacher)()
    else:
        assert type(build(folder)).__name__ == "Qwen3ForCausalLM"
    assert not marker.exists()


def test_code_of_a_tokenizer_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Own: pass\n")
    settings = {"tokenizer_class": "Own", "chat_template": "x", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ConfigError, match="brings its own Python code, which is never run"):
        ChatTemplate(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_weights_that_lost_their_scale_are_refused(tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    folder = edit_weights(save_model(tmp_path / "m"), lambda weights: weights.update({UP: weights[UP].to(dtype)}))
    if form == "pickle":
        as_pickle(folder)
    assert f"{UP} is " in (message := refusal(folder))
    assert "add the quantization_config" in message


def test_a_gemma_3_with_a_vision_tower_gives_its_text_model(tmp_path: Path) -> None:
    text = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = Gemma3Config(
        text_config={**text, "num_key_value_heads": 1, "intermediate_size": 16},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
    )
    stored = Gemma3ForConditionalGeneration(config).eval()
    stored.save_pretrained(tmp_path / "m")
    found = build(tmp_path / "m").eval()
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(found(ids).logits, stored(input_ids=ids).logits, rtol=0, atol=1e-6)
    found.save_pretrained(tmp_path / "trained")
    assert torch.equal(build(tmp_path / "trained").eval()(ids).logits, found(ids).logits)


def test_the_attention_that_a_folder_asks_for_need_not_be_installed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    plain, asked = build(folder), build(edit_config(folder, attn_implementation="flash_attention_2"))
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(asked(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"rope_type": "nonsense", "factor": 2.0}, {"type": "nonsense"}])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_an_unknown_rope_type_is_named(tmp_path: Path, key: str, settings: dict[str, object]) -> None:
    message = refusal(edit_config(save_model(tmp_path / "m"), **{key: settings}))
    assert f"asks in {key} for the rope type 'nonsense'" in message


def test_a_tokenizer_that_is_not_the_models_is_refused_or_named_and_padding_is_not(tmp_path: Path) -> None:
    own = save_bytes(tmp_path / "own", EOS, "<extra>")
    num_ids = len(Tokenizer.from_file(str(own / "tokenizer.json")).get_vocab())
    longer = save_bytes(tmp_path / "longer", EOS, "<extra>")
    extended = Tokenizer.from_file(str(longer / "tokenizer.json"))
    extended.add_special_tokens(["<more>"])
    extended.save(str(longer / "tokenizer.json"))
    other = save_bytes(tmp_path / "other", "<first>", EOS)
    bare = tmp_path / "bare"
    bare.mkdir()

    def model(vocab_size: int, **ids: object) -> PreTrainedModel:
        return models.build(vocab_size=vocab_size, **ids)

    padded = round(num_ids / 0.95)
    assert tokenizer_note(model(padded, eos_token_id=0), own, own) is None
    assert tokenizer_note(model(padded, eos_token_id=padded - 1), bare, own) is None, "padding may have a name"
    assert tokenizer_note(model(padded), own, longer) is None
    assert tokenizer_note(model(5000), None, own) is None, "random weights know no tokenizer"
    assert tokenizer_note(model(5000), bare, None) is None
    note = tokenizer_note(model(5000, eos_token_id=0), bare, own)
    assert note is not None
    assert note.startswith(f"warning: {own} has {num_ids} tokens for the model's 5,000")
    for ids in ({"eos_token_id": 4000}, {"eos_token_id": [0, 4000]}, {"bos_token_id": 4000}):
        with pytest.raises(InputError, match=rf"{next(iter(ids))} of the model is 4000, but .* no token with"):
            tokenizer_note(model(5000, **ids), bare, own)
    with pytest.raises(InputError, match=r"token '<\|endoftext\|>' is 0 in .*own but 1 in .*other \(1 differ\)"):
        tokenizer_note(model(padded), own, other)


EOS = "<|endoftext|>"


def save_bytes(folder: Path, *special: str) -> Path:
    return save_tokenizer(folder, list(special), eos_token=EOS)
