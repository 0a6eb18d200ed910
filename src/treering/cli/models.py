"""Load and build models from folders, checkpoints and the hub, with errors that name what is wrong."""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from treering.cli.hub import find_folder, find_model
from treering.config.model import DistillOptions, LoraOptions, ModelConfig
from treering.data.rendering.encoder import open_tokenizer
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.families import IMAGE_FAMILIES
from treering.files.writing import read_object
from treering.train.loop.lora_adapters import ADAPTER_CONFIG_FILE, add_lora

# In the order in which transformers looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Names of floating-point types in safetensors and torch.
_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16", "BOOL", "bool")
_POINTER = b"version https://git-lfs"


def check_model_folder(folder: Path, setting: str = "model.path") -> None:
    """Check that a folder has config.json and complete files of weights; only headers are read.

    `setting` names the folder in errors. Pickled weights (.bin) are opened with `weights_only` and run no code.

    Raises:
        InputError: names the file that is missing, cut, a Git LFS pointer or in another format, or the quantized weight
            that the configuration does not describe.

    Example: a model.safetensors of half its size is refused with "fetch it again".
    """
    if not folder.is_dir():
        raise InputError(f"{setting} must be the folder of a Hugging Face model, but {folder} is not a folder")
    config = folder / "config.json"
    if not config.is_file() and (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} has an adapter but no config.json; merge it into its model, and name that folder")
    if not config.is_file():
        raise InputError(f"{folder} has no config.json, so it is not a model folder; correct {setting}")
    _check_no_pointer(config)
    described = read_object(config)
    if "model_type" not in described:
        raise InputError(f"{config} has no model_type; correct it")
    # Quantized weights are read by the method that the configuration names.
    is_plain = "quantization_config" not in described
    for file in _weight_files(folder):
        not_floats = _check_weights(file)
        if is_plain and not_floats:
            name, dtype = not_floats[0]
            raise InputError(
                f"{file}: {name} is {dtype}, but a model without quantization_config needs float32, bfloat16 or "
                "float16; add the quantization_config that the weights were written with, or fetch the model "
                "unquantized"
            )


def _weight_files(folder: Path) -> list[Path]:
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise InputError(
            f"{folder} has no weights, neither model.safetensors nor numbered parts with an index; fetch them"
        )
    if file.suffix != ".json":
        return [file]
    _check_no_pointer(file)
    parts = read_object(file).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise InputError(f"{file} has no weight_map with the file of each weight; fetch it again")
    return [folder / part for part in sorted(set(parts.values()))]


def _check_weights(file: Path) -> list[tuple[str, str]]:
    """Open a file; return name and dtype of its matrices that are not plain floating-point numbers."""
    try:
        _check_no_pointer(file)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                slices = ((name, weights.get_slice(name)) for name in weights.keys())  # noqa: SIM118
                kinds = [(name, each.get_dtype(), len(each.get_shape())) for name, each in slices]
        else:
            loaded = torch.load(file, map_location="meta", weights_only=True)
            named = loaded.items() if isinstance(loaded, dict) else ()
            tensors = [(name, each) for name, each in named if isinstance(each, torch.Tensor)]
            kinds = [(name, str(each.dtype).removeprefix("torch."), each.ndim) for name, each in tensors]
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing, but its folder's index names it; fetch it") from error
    except SafetensorError as error:
        raise InputError(f"{file} is cut or not a safetensors file ({error}); fetch it again") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # Torch's own message ends with advice to turn weights_only off.
        reason = type(error).__name__
        raise InputError(f"{file} is cut, or holds something other than weights ({reason}); fetch it again") from error
    # Vectors and ids, such as stored positions, may be integers.
    return [(n, dtype) for n, dtype, num_axes in kinds if num_axes > 1 and dtype not in _FLOATS and "_ids" not in n]


def _check_no_pointer(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise InputError(f"{file} is a Git LFS pointer instead of the file itself; fetch it with `git lfs pull`")


_LEAST_SHARE = 0.9
"""Smallest share of a model's vocabulary that its own tokenizer fills; the rest is padding."""


def build_model(
    config: ModelConfig,
    *,
    num_ids: int,
    seed: int,
    folder: Path | None,
    lora: LoraOptions | None = None,
    takes_images: bool = False,
) -> PreTrainedModel:
    """Return the model with float32 weights, on the configured device.

    Args:
        config: the [model] section.
        num_ids: number of token ids in the data; the vocabulary of a random model.
        seed: of random weights; changes torch's random state.
        folder: where `config.path` was found; None for a random model.
        lora: the [lora] section; None adds no adapters.
        takes_images: whether the data has images; if not, only the text model of a Gemma 3 is used.

    Raises:
        ConfigError: the vocabulary is too small, or there is no CUDA device.
        InputError: the folder has no model, a damaged one, or one whose weights do not match its config.json exactly; a
            random weight is never trained in place of a missing one.

    Example: the default shape with num_ids=512 has about 917,000 parameters.
    """
    device = choose_device(config.device)
    if folder is None and takes_images:
        raise ConfigError("the data has images, but a random model takes none; set model.path")
    if config.vision == "frozen" and not takes_images:
        raise ConfigError('model.vision = "frozen" needs data with images, but this has none; remove it')
    model = _random(config, num_ids, seed) if folder is None else _load(folder, takes_images=takes_images)
    vocab_size = int(model.config.get_text_config().vocab_size)
    if vocab_size < num_ids:
        raise ConfigError(
            f"the data has the token id {num_ids - 1}, but the model's end at {vocab_size - 1}; use the tokenizer "
            "of this model"
        )
    if lora is not None and lora.rank is not None and folder is not None:
        torch.manual_seed(seed)
        # A revision means that the path is a hub id, as set by `as_started`.
        base = str(folder.resolve()) if config.revision is None else str(config.path)
        add_lora(model, lora, base=base, revision=config.revision)
    if config.vision == "frozen":
        # Only the language model, its head and their adapters stay trainable.
        for name, weight in model.named_parameters():
            if not any(part in name.split(".") for part in ("language_model", "lm_head")):
                weight.requires_grad_(False)
    return model.to(device)


def find_teacher(
    teacher: DistillOptions, student: ModelConfig, config_dir: Path, *, tokenizer: Path | None
) -> PreTrainedModel | None:
    """Return the teacher in the student's compute type, on its device, without gradients; None without one.

    Args:
        teacher: the [teacher] section.
        student: the [model] section.
        config_dir: folder of the configuration file.
        tokenizer: folder of the tokenizer of the student and its data; None if ids are not from one.

    Raises:
        InputError: its folder has no model, or a tokenizer whose tokens differ from the student's.

    Example: the teacher of a student in bfloat16 has bfloat16 weights.
    """
    folder = find_model(teacher, config_dir, setting="teacher.path")
    if folder is None:
        return None
    if tokenizer is not None:
        _check_same_tokenizer(folder, tokenizer)
    model = _load(folder, setting="teacher.path").eval().requires_grad_(False)
    dtype = torch.bfloat16 if student.dtype == "bfloat16" else torch.float32
    return model.to(choose_device(student.device), dtype)


def load_checkpoint(folder: Path, *, takes_images: bool = False) -> nn.Module:
    """Return the model of a checkpoint, with float32 weights; adapters come around their base model.

    Args:
        folder: the checkpoint, or a model.
        takes_images: whether to load a model that takes images, or a text model.

    Raises:
        InputError: it is not such a model, or the base model of adapters is no longer found.
    """
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        plain: nn.Module = _load(folder, "the checkpoint", takes_images=takes_images)
        return plain
    require("a checkpoint of adapters", "peft")
    from peft import PeftModel

    model = _load(base_of(folder), "the base model of the adapters", takes_images=takes_images)
    loaded: nn.Module = PeftModel.from_pretrained(model, folder)
    return loaded


def base_of(folder: Path) -> Path:
    """Return the folder of the base model of a checkpoint's adapters; the checkpoint itself if it has none.

    Raises:
        InputError: the base model is no longer found.
    """
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        return folder
    settings = json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())
    name, revision = settings["base_model_name_or_path"], settings.get("revision")
    return find_folder(name, [Path()], setting="the base model of the adapters", revision=revision)


def _check_same_tokenizer(folder: Path, tokenizer: Path) -> None:
    files = [each / "tokenizer.json" for each in (folder, tokenizer)]
    if not all(file.is_file() for file in files):
        return
    own, given = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    different = sorted(token for token in own.keys() | given.keys() if own.get(token) != given.get(token))
    if different:
        raise InputError(
            f"the teacher's tokenizer differs from the student's: token {different[0]!r} is {own.get(different[0])} in "
            f"{files[0]} and {given.get(different[0])} in {files[1]} ({len(different)} differ); use a teacher with the "
            "same tokenizer"
        )


def tokenizer_note(model: PreTrainedModel, folder: Path | None, tokenizer: Path | None) -> str | None:
    """Return a warning if a tokenizer has far fewer tokens than its model, else None.

    A vocabulary may be padded: Qwen3's has 151,936 rows for 151,669 tokens. Nothing is checked without a tokenizer, or
    for random weights (`folder` None).

    Raises:
        InputError: the model was certainly trained with another tokenizer: its own in `folder` gives a token another
            id, or the model begins or ends texts with an id that a small tokenizer does not have.
    """
    if folder is None or tokenizer is None:
        return None
    given = open_tokenizer(tokenizer)
    _check_own_tokenizer(folder, given, tokenizer)
    num_ids, vocab_size = 1 + max(given.get_vocab().values()), int(model.config.get_text_config().vocab_size)
    if num_ids >= _LEAST_SHARE * vocab_size:
        return None
    sizes = f"{tokenizer} has {num_ids:,} tokens for the model's {vocab_size:,}"
    for name, token_id in _ends_and_begins(model):
        if given.id_to_token(token_id) is None:
            raise InputError(
                f"{name} of the model is {token_id}, but {sizes} and no token with that id; use the tokenizer of this "
                "model"
            )
    return f"warning: {sizes}; unless it is the model's own, its ids mean other tokens to the model"


def _check_own_tokenizer(folder: Path, given: Tokenizer, tokenizer: Path) -> None:
    if tokenizer.resolve() == folder.resolve() or not (folder / "tokenizer.json").is_file():
        return
    ours, theirs = open_tokenizer(folder).get_vocab(), given.get_vocab()
    moved = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if moved:
        raise InputError(
            f"token {moved[0]!r} is {ours[moved[0]]} in {folder} but {theirs[moved[0]]} in {tokenizer} ({len(moved)} "
            "differ); use the tokenizer of this model, with which it was trained"
        )


def _ends_and_begins(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    for settings in (model.config.get_text_config(), model.generation_config):
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(settings, name, None)
            yield from ((name, one) for one in (value if isinstance(value, list) else [value]) if one not in (None, -1))


def choose_device(requested: str) -> torch.device:
    """Return the device for "auto" (cuda if available), "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" without a CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ConfigError('model.device = "cuda" needs a CUDA device, but torch sees none; set "auto" or "cpu"')
    return torch.device("cuda" if has_cuda and requested != "cpu" else "cpu")


def _random(config: ModelConfig, num_ids: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    num_heads = max(2, config.hidden_size // 32)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=num_ids,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // (1 if num_heads % 2 else 2),
            head_dim=config.hidden_size // num_heads,
            intermediate_size=3 * config.hidden_size,
            tie_word_embeddings=True,
            # Random weights do not prefer any position.
            max_position_embeddings=1 << 20,
            dtype=torch.float32,
        )
    )


def _load(folder: Path, setting: str = "model.path", *, takes_images: bool = False) -> PreTrainedModel:
    check_model_folder(folder, setting)
    described = json.loads((folder / "config.json").read_bytes())
    _check_rope(folder, described)
    _check_kind(folder, described.get("model_type"), setting, takes_images=takes_images)
    loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    # Attention follows the tree, whatever implementation the folder asks for, which may not be installed here.
    attention = {"attn_implementation": "eager"} if "attn_implementation" in described else {}
    with _refused_by_name(folder, described, setting), _quiet_transformers():
        # Training needs float32 weights; bfloat16 loses small updates. `_check_loaded` names other shapes.
        model, loaded = loader.from_pretrained(
            str(folder),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            weights_only=True,
            **attention,
        )
    _check_loaded(folder, type(model).__name__, loaded)
    is_whole = takes_images or getattr(model.config, "vision_config", None) is None
    return model if is_whole else _text_model(model, folder, setting)


def _check_kind(folder: Path, kind: object, setting: str, *, takes_images: bool) -> None:
    if takes_images and kind not in IMAGE_FAMILIES:
        raise InputError(
            f"the data has images, but {folder} holds a model of type {kind!r}; use one of {', '.join(IMAGE_FAMILIES)}"
        )
    if not takes_images and kind in IMAGE_FAMILIES and kind != "gemma3":
        raise InputError(
            f"{setting} needs a text model here, but {folder} holds a model of type {kind!r}, which takes images: "
            "treering sft trains it on chats with images"
        )


@contextmanager
def _refused_by_name(folder: Path, described: Mapping[str, Any], setting: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        what, fix = "asks for", "remove what asks for it"
        if "quantization_config" in described:
            what, fix = "describes weights that need", "use the model's folder without quantization"
        raise InputError(
            f"{folder / 'config.json'} {what} a package that is not installed ({error}); install it, or {fix}"
        ) from error
    except Exception as error:  # a configuration may be wrong in many ways
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{setting} needs a model of transformers itself, but {folder} brings its own Python code, which is "
                "never run; use a model whose type transformers knows"
            ) from error
        raise InputError(
            f"{folder} cannot be loaded as a causal language model ({error}); correct {setting}, or fetch the folder "
            "again"
        ) from error


def _text_model(model: PreTrainedModel, folder: Path, setting: str) -> PreTrainedModel:
    """Return the language model of a Gemma 3 with a vision tower, whose stored names its own class does not know."""
    if model.config.model_type != "gemma3":
        raise InputError(
            f"{setting} needs a text model, but {folder} holds a {type(model).__name__}, which takes "
            "images; use the text model of that family"
        )
    with torch.device("meta"):
        text: PreTrainedModel = AutoModelForCausalLM.from_config(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    text.generation_config = model.generation_config
    return text


def _check_rope(folder: Path, described: Mapping[str, Any]) -> None:
    """Refuse a kind of rotary position that transformers does not know; its own error does not name the cause."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for key in ("rope_parameters", "rope_scaling"):
        settings = described.get(key)
        kind = settings.get("rope_type", settings.get("type", "default")) if isinstance(settings, dict) else "default"
        if kind not in ("default", "mrope", *ROPE_INIT_FUNCTIONS):
            raise InputError(
                f"{folder / 'config.json'} asks in {key} for the rope type {kind!r}, but this transformers knows "
                f"{', '.join(ROPE_INIT_FUNCTIONS)}; correct it, or install the transformers that the model came with"
            )


def _check_loaded(folder: Path, name: str, loaded: Mapping[str, Any]) -> None:
    problems = [
        *(f"{key} is missing" for key in sorted(loaded["missing_keys"])),
        *(f"{key} is {list(there)} instead of {list(here)}" for key, there, here in sorted(loaded["mismatched_keys"])),
        *(f"{key} does not belong to it" for key in sorted(loaded["unexpected_keys"])),
    ]
    if problems:
        more = f", and {len(problems) - 1} more do not fit" if len(problems) > 1 else ""
        raise InputError(
            f"{folder} does not match the {name} of its config.json: {problems[0]}{more}; "
            "correct config.json, or fetch the folder again"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
