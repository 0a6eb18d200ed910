"""A tiny model with its own tokenizer, for requests about text: grammars, choices, stop strings."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.integrations.vllm.llms import build

END = "<|end|>"
VOCAB = 128
_OBJECT = {"name": "ada", "kind": "sum", "age": 36, "of": ["loop"]}
_TEXTS = [json.dumps(_OBJECT), "the sum of the tags", "none of them"] * 9


def save_worded_model(folder: Path) -> None:
    """Save a model and a tokenizer whose tokens are printable characters and some longer pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Ġ is how a byte-level tokenizer writes a space.
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=letters, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    model = build(tied=False, vocab_size=VOCAB)
    model.config.eos_token_id = model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)


def save_lora(folder: Path, *, rank: int = 4, seed: int = 0) -> None:
    """Save an adapter of queries and values as PEFT does, large enough to change the likeliest token."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, size in (("q_proj", 64), ("v_proj", 32)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(rank, 64, generator=generator)
            weights[f"{module}.lora_B.weight"] = 0.3 * torch.randn(size, rank, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
