"""The supported model families: one record for each `config.model_type`, which every package reads.

A new family needs a record here, a model in `tests/models.py`, and a row in docs/models.md and in the README's list.
Users register their own families with `register_family`.
"""

from dataclasses import dataclass
from typing import Literal

from treering.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of text decoders.

    Every family has full or sliding-window attention, RoPE, and an output head that is one matrix. A tree step is exact
    only if every layer computes a token from the tokens on its path.

    Attributes:
        model_type: `config.model_type`; the language model's in models that take images.
        mixer: attribute of a block with its recurrent layer (Gated DeltaNet, Mamba-2). Other kinds are refused.
        router: attribute of a block's `mlp` with the router of its experts. Router losses need it.
        liger_activation: activation that Liger's kernels compute for this family. None if liger-kernel has no kernels
            for `model_type`, or if they are not tested on trees; `layers = "liger"` is then refused.
        counts_flops: kind of MLP whose sizes `ModelShape` reads from `config.json`; None if FLOPs are not counted.
        engine: when `TorchEngine` runs the family: always, inside a model that takes images, or never. It reads weights
            in Llama's layout (a norm before attention and one before the MLP, norms of queries and keys if a layer has
            them) and refuses a model whose logits come out different.
    """

    model_type: str
    mixer: str | None = None
    router: str | None = None
    liger_activation: str | None = None
    counts_flops: Literal["dense", "experts"] | None = None
    engine: Literal["always", "with images", "never"] = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """A family of models that take images, around a language model of a `Family`.

    Attributes:
        model_type: `config.model_type` of the whole model.
        tokens_per_crop: configuration key with the number of tokens per crop; None for a family with grids of patches.
        sees_whole_images: whether the tokens of an image attend to all tokens of that image.
        token_types: argument that marks image tokens for the stock model; None if it needs none.
    """

    model_type: str
    tokens_per_crop: str | None = None
    sees_whole_images: bool = False
    token_types: str | None = None


FAMILIES: dict[str, Family] = {}
"""Families of language models, by `config.model_type`."""

IMAGE_FAMILIES: dict[str, ImageFamily] = {}
"""Families of models that take images, by `config.model_type`."""


def find_family(model_type: str) -> Family:
    """Return the family of language models with this `config.model_type`.

    Raises:
        UnsupportedError: there is none.

    Example: `find_family("qwen3").model_type` is "qwen3".
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return family


def register_family(family: Family | ImageFamily) -> None:
    """Register a family in this process.

    Raises:
        ConfigError: the name is registered with other attributes.

    Example: `register_family(Family(model_type="my_llama", engine="always"))` for a class in Llama's layout that is
    registered with `AutoModelForCausalLM.register` and computes every token from its own path.
    """
    known: dict[str, Family] | dict[str, ImageFamily] = FAMILIES if isinstance(family, Family) else IMAGE_FAMILIES
    if known.setdefault(family.model_type, family) != family:  # type: ignore[arg-type]
        raise ConfigError(
            f"each model_type has one family, and {family.model_type!r} is registered as {known[family.model_type]}; "
            "choose another model_type"
        )


for _family in (
    Family(model_type="llama", liger_activation="silu", counts_flops="dense", engine="always"),
    Family(model_type="mistral", liger_activation="silu", counts_flops="dense", engine="always"),
    Family(model_type="qwen2", liger_activation="silu", counts_flops="dense", engine="always"),
    Family(model_type="qwen3", liger_activation="silu", counts_flops="dense", engine="always"),
    Family(model_type="gemma2", liger_activation="gelu_pytorch_tanh"),
    Family(model_type="gemma3_text", liger_activation="gelu_pytorch_tanh"),
    Family(model_type="gpt_oss", router="router"),
    Family(model_type="mixtral", router="gate"),
    Family(model_type="qwen3_moe", router="gate", counts_flops="experts"),
    Family(model_type="phi3", liger_activation="silu"),
    Family(model_type="granite", liger_activation="silu"),
    Family(model_type="olmo2", liger_activation="silu"),
    Family(model_type="smollm3", liger_activation="silu"),
    Family(model_type="glm4", liger_activation="silu"),
    Family(model_type="qwen3_next", mixer="linear_attn", router="gate"),
    Family(model_type="qwen3_5_text", mixer="linear_attn"),
    Family(model_type="qwen3_5_moe_text", mixer="linear_attn", router="gate"),
    Family(model_type="bamba", mixer="mamba"),
    Family(model_type="qwen2_5_vl_text", counts_flops="dense", engine="with images"),
    Family(model_type="qwen3_vl_text", counts_flops="dense", engine="with images"),
    ImageFamily(model_type="qwen2_5_vl", token_types="mm_token_type_ids"),
    ImageFamily(model_type="qwen3_vl", token_types="mm_token_type_ids"),
    ImageFamily(
        model_type="gemma3",
        tokens_per_crop="mm_tokens_per_image",
        sees_whole_images=True,
        token_types="token_type_ids",
    ),
    ImageFamily(model_type="internvl", tokens_per_crop="image_seq_length"),
):
    register_family(_family)
