"""`treering sft` on chats with images: a vision model trains on them, with or without sharing, to the same losses."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.cli.runs import metrics_of
from tests.data.images.vlm_folder import as_bytes, as_uri, image, make_folder
from treering.cli.corpus import load_corpus
from treering.cli.options import EvalArguments
from treering.cli.run_eval import run as evaluate
from treering.cli.sft_command import split_corpus
from treering.config import SftConfig, load
from treering.errors import ConfigError

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 16,
    "window_size": 112,
    "fullatt_block_indexes": [0],
}
CONFIG = """
[model]
path = "{model}"
[data]
files = ["set.jsonl"]
[train]
num_steps = 3
trees_per_step = 2
layout = "{layout}"
max_batch_tokens = 4000
[optim]
learning_rate = 1e-2
[run]
dir = "{layout}"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small Qwen2.5-VL that reads the tests' tokenizer."""
    folder = make_folder(tmp_path_factory.mktemp("vlm"), "qwen")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {f"{name}_token_id": tokenizer.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    edges = {f"vision_{name}_token_id": tokenizer.token_to_id(f"<|vision_{name}|>") for name in ("start", "end")}
    text = {**_TEXT, "vocab_size": tokenizer.get_vocab_size()}
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=_VISION, **ids, **edges)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def write_rows(folder, name="set.jsonl", seeds=range(3)):
    """Write two answers each to one question on some images, so that equal ids stand for other pixels."""
    with open(folder / name, "w") as stream:
        for number, seed in enumerate(seeds):
            part = {"type": "image", "image": as_uri(as_bytes(image(seed, (56, 56))))}
            for answer in ("the agent calls", "the agent answers"):
                asked = {"role": "user", "content": [part, {"type": "text", "text": "the tool"}]}
                # All rows are of one task, so that only their images keep the branches apart.
                row = {"task_id": number // 2, "messages": [asked, {"role": "assistant", "content": answer}]}
                stream.write(json.dumps(row) + "\n")


@pytest.fixture
def losses(folder, sft, model):
    """`losses(layout, *overrides)` returns the summary and the losses of a run on the rows."""
    write_rows(folder)

    def trained(layout, *overrides):
        (folder / "run.toml").write_text(CONFIG.format(model=model, layout=layout))
        summary, _ = sft(folder / "run.toml", *overrides)
        return summary, [row["train/loss"] for row in metrics_of(folder / layout) if "train/loss" in row]

    return trained


def test_trees_and_separate_sequences_train_alike(losses, model):
    shared, of_trees = losses("tree")
    plain, of_rows = losses("packed")
    assert shared["unique_tokens"] < plain["unique_tokens"] == shared["flat_tokens"]
    # Rounding in float32, amplified by steps of Adam.
    assert of_trees == pytest.approx(of_rows, rel=1e-4)
    assert of_trees[-1] < of_trees[0]
    weights = transformers.AutoModelForImageTextToText.from_pretrained(shared["checkpoint"])
    first = transformers.AutoModelForImageTextToText.from_pretrained(model)
    moved = dict(first.named_parameters())
    assert all(not torch.equal(weight, moved[name]) for name, weight in weights.named_parameters() if "visual" in name)
    assert (Path(shared["checkpoint"]) / "preprocessor_config.json").is_file()


def test_a_frozen_vision_part_stays_and_the_rest_is_trained(losses, model):
    summary, _ = losses("tree", "model.vision=frozen", "train.num_steps=1")
    weights = transformers.AutoModelForImageTextToText.from_pretrained(summary["checkpoint"])
    first = dict(transformers.AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    stays = {name: torch.equal(weight, first[name]) for name, weight in weights.named_parameters()}
    assert {name for name, same in stays.items() if same} == {name for name in stays if "visual" in name}


@pytest.mark.parametrize("rank", [None, 2])
def test_a_checkpoint_is_evaluated_like_its_run_and_loads_as_its_card_shows(losses, folder, capsys, rank):
    if rank:
        pytest.importorskip("peft")
    write_rows(folder, "held.jsonl", range(3, 5))
    adapters = [f"lora.rank={rank}"] if rank else []
    summary, _ = losses("tree", "train.num_steps=1", 'eval.files=["held.jsonl"]', *adapters)
    last = metrics_of(folder / "tree")[-1]
    evaluate(EvalArguments(name="tree", json_output=True))
    found = json.loads(capsys.readouterr().out)
    # The same computation on one thread.
    assert found["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    card = (Path(summary["checkpoint"]) / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    loaded = {}
    exec(card.split("```python")[1].split("```")[0].replace("path/to/this/folder", summary["checkpoint"]), loaded)
    assert type(loaded["model"]).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert any("lora_B" in name for name, _ in loaded["model"].named_parameters()) == bool(rank)


def test_adapters_are_of_the_language_model_and_resume(losses):
    pytest.importorskip("peft")
    options = ("lora.rank=2", "optim.schedule=constant")
    losses("tree", "train.num_steps=1", *options)
    summary, _ = losses("tree", "train.num_steps=2", *options)
    adapters = load_file(Path(summary["checkpoint"]) / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7
    assert all("language_model" in name for name in adapters)
    assert any(weight.any() for name, weight in adapters.items() if "lora_B" in name)


def test_a_model_that_does_not_see_is_refused(folder, sft, model):
    write_rows(folder)
    text = CONFIG.format(model=model, layout="tree").replace(f'path = "{model}"', "hidden_size = 16")
    (folder / "run.toml").write_text(text.replace("[data]", f'[data]\ntokenizer = "{model}"'))
    with pytest.raises(ConfigError, match=r"takes none; set model\.path"):
        sft(folder / "run.toml")


def test_equal_ids_on_other_pixels_are_other_data(folder, model):
    write_rows(folder)
    write_rows(folder, "other.jsonl", range(3, 6))
    (folder / "run.toml").write_text(CONFIG.format(model=model, layout="tree"))
    digests, said = set(), []
    for name in ("set.jsonl", "other.jsonl"):
        config = load(SftConfig, folder / "run.toml", [f'eval.files=["{name}"]'])
        corpus = load_corpus(config.data, config_dir=folder, model=model)
        trained, held = split_corpus(config, corpus, config_dir=folder, model=model)
        digests.update(held.digests.values())
        said.append(any("also trained on" in note for note in trained.notes))
    assert len(digests) == 2
    assert said == [True, False]
