"""A small byte-level tokenizer with merges, built here so that no external file is needed."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "user assistant system tool\n\n",
    "the agent calls a tool and the tool answers the agent\n",
    "Search[x] 12 + 30 = 42 äöü\n\n\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(special_tokens: list[str], corpus: list[str], *, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return tokenizer


def save_tokenizer(folder: Path, special_tokens: list[str], **settings: object) -> Path:
    """Save a Hugging Face tokenizer folder with these settings."""
    folder.mkdir(exist_ok=True)
    build_tokenizer(special_tokens, CORPUS, use_regex=True).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer folder whose template is the plain chat form."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return save_tokenizer(folder, ["<|im_start|>", "<|im_end|>"], chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def markerless_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without special markers, whose merges run from the end of a message into the next one."""
    folder = tmp_path_factory.mktemp("markerless")
    build_tokenizer([], ["<|im_end|>\n<|im_start|>"], use_regex=False).save(str(folder / "tokenizer.json"))
    return folder
