"""Shared types: token ids, prompt ids, and the sizes of a decoder that decide its cost per token."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from treering.errors import ConfigError, UnsupportedError
from treering.families import FAMILIES

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Token ids, int32, one dimension."""

LossMask: TypeAlias = npt.NDArray[np.bool_]
"""True where a token is trained, one entry per token."""

PromptId: TypeAlias = str | int
"""Id of a prompt, the same in every epoch: a dataset key, else a hash of the token ids."""

Layout: TypeAlias = Literal["tree", "joined", "packed"]
"""How the tasks of a step become forests: a tree per task, one tree for all, or a chain per sequence."""

MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
"""Largest token id in a forest."""


def is_count(value: object, *, least: int) -> TypeGuard[int]:
    """Return whether a value is an int or numpy integer, not a bool, and at least `least`.

    Example: with `least=1`, 4 and `np.int64(4)` are counts; 0, 1.0 and True are not.
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def num_common(left: TokenIds, right: TokenIds) -> int:
    """Return the length of the common prefix of two sequences.

    >>> num_common(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
    2
    """
    size = min(left.size, right.size)
    differ = left[:size] != right[:size]
    return int(differ.argmax()) if differ.any() else size


def hash_of_prompt(tokens: Sequence[int] | TokenIds) -> str:
    """Return the id of a prompt without a dataset key: a hash of its token ids, the same in every process.

    Example: `hash_of_prompt([5, 6])` has 16 hexadecimal digits.
    """
    return blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a causal decoder with gated MLPs that decide its cost per token.

    Example: with hidden size 256, 4 heads, 2 key-value heads, head size 64 and MLPs of 768, a layer has 786,432
    parameters. Two layers and an output head over 256 tokens are 1,638,400 parameters per token.
    """

    name: str
    """Name in reports, such as "qwen3-8b"."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads per layer."""
    num_kv_heads: int
    """Key and value heads per layer."""
    head_size: int
    """Width of one head."""
    intermediate_size: int
    """Width of the gated MLP, or of one expert."""
    vocab_size: int
    """Rows of the output head."""
    num_experts: int = 1
    """Experts per layer; 1 is a dense MLP without a router."""
    num_active_experts: int = 1
    """Experts that each token passes through."""

    def __post_init__(self) -> None:
        for field in self.__slots__:
            value = getattr(self, field)
            if field != "name" and (type(value) is not int or value < 1):
                raise ConfigError(f"{field} of a model shape must be an integer >= 1, got {value!r}; correct it")
        if self.num_active_experts > self.num_experts:
            raise ConfigError(
                f"a token cannot pass through more experts than there are: num_active_experts="
                f"{self.num_active_experts} of num_experts={self.num_experts}; lower the first"
            )

    @property
    def params_per_token(self) -> int:
        """Parameters that one token is multiplied with: projections, active experts, router and output head.

        The embedding is not counted because it is a look-up; norms and biases are not counted because they are small.
        """
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size * self.num_active_experts
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return self.num_layers * (attention + mlp + router) + self.hidden_size * self.vocab_size


def _shape(name: str, *sizes: int, vocab: int, experts: tuple[int, int] = (1, 1)) -> tuple[str, ModelShape]:
    num_layers, hidden_size, num_heads, num_kv_heads, head_size, intermediate_size = sizes
    shape = ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab,
        num_experts=experts[0],
        num_active_experts=experts[1],
    )
    return name, shape


NAMED_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    dict(
        [
            _shape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, vocab=151936),
            _shape("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, vocab=151936),
            _shape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, vocab=151936),
            _shape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, vocab=151936),
            _shape("qwen3-14b", 40, 5120, 40, 8, 128, 17408, vocab=151936),
            _shape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, vocab=151936),
            _shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, vocab=151936, experts=(128, 8)),
            _shape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, vocab=151936),
            _shape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, vocab=151936),
            _shape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, vocab=152064),
            _shape("qwen2.5-math-7b", 28, 3584, 28, 4, 128, 18944, vocab=152064),
            _shape("llama3-8b", 32, 4096, 32, 8, 128, 14336, vocab=128256),
            _shape("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, vocab=128256),
        ]
    )
)
"""Shapes of published models by name."""


DEFAULT_SHAPE = "qwen3-8b"
"""Shape for FLOPs where the model is unknown."""


def find_shape(name_or_path: str) -> ModelShape:
    """Return the shape with that name in `NAMED_SHAPES`, else the shape in a Hugging Face `config.json` or its folder.

    Raises:
        ConfigError: it is neither; the message has the nearest names.

    Example: `find_shape("qwen3-8b").params_per_token` is 7,568,097,280.
    """
    named = NAMED_SHAPES.get(name_or_path.lower())
    if named is not None:
        return named
    if Path(name_or_path).exists():
        return read_shape(Path(name_or_path))
    near = difflib.get_close_matches(name_or_path.lower(), NAMED_SHAPES, n=3, cutoff=0.4) or list(NAMED_SHAPES)
    raise ConfigError(
        f"a model shape is a known name or a Hugging Face config, got {name_or_path!r}; "
        f"nearest names: {', '.join(near)}; or give the path of a config.json or of its folder"
    )


def read_shape(path: Path) -> ModelShape:
    """Return the shape in a Hugging Face `config.json`, given its path or its folder.

    The shape of a model that takes images is that of its text model.

    Raises:
        ConfigError: the file is missing or damaged.
        UnsupportedError: FLOPs of the architecture are not counted.

    Example: hidden_size 256 and num_attention_heads 4 without head_dim give head_size 64.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_config(file)
    if isinstance(config.get("vision_config"), dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None or family.counts_flops is None:
        known = ", ".join(family.model_type for family in FAMILIES.values() if family.counts_flops)
        raise UnsupportedError(f"FLOPs are counted for model_type {known}; {file} has {kind!r}; name a known shape")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedError(f"every layer must have the same MLP to be counted; {file} mixes dense and expert ones")
    has_experts = family.counts_flops == "experts"
    num_heads = _size(config, "num_attention_heads", file)
    hidden_size = _size(config, "hidden_size", file)
    return ModelShape(
        name=path.name if path.is_dir() else file.parent.name,
        num_layers=_size(config, "num_hidden_layers", file),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", file, default=num_heads),
        head_size=_size(config, "head_dim", file, default=hidden_size // num_heads),
        intermediate_size=_size(config, "moe_intermediate_size" if has_experts else "intermediate_size", file),
        vocab_size=_size(config, "vocab_size", file),
        num_experts=_size(config, "num_experts", file) if has_experts else 1,
        num_active_experts=_size(config, "num_experts_per_tok", file) if has_experts else 1,
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"a model shape needs a readable config.json; {file}: {error.strerror}; check it") from error
    except ValueError as error:
        raise ConfigError(f"a model shape needs a JSON config; {file} is not JSON ({error}); repair it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"a model config is a JSON object; {file} holds a {type(config).__name__}; repair it")
    return config


def _size(config: Mapping[str, Any], key: str, file: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key} must be an integer >= 1, got {value!r}; correct it in {file}")
    return value
