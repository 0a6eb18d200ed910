"""Every method of the installed PEFT is exact on trees or refused by name; none is trusted because it runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft", minversion="0.21", reason="older releases lack some of the methods")

import peft
import peft.tuners.lora.config as lora_config
from peft import LoraConfig, PeftConfig, get_peft_model

from tests.models import build
from treering.errors import UnsupportedError
from treering.model.patch import patch
from treering.model.tree_model import ADAPTERS, LORA_VARIANTS

# PEFT warns about its own methods.
pytestmark = pytest.mark.filterwarnings("default")

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 12, 13, 14], [5, 6, 20, 21, 22, 0, 0]])
LENGTHS = (7, 7, 5)
MASK = (torch.arange(7)[None] < torch.tensor(LENGTHS)[:, None]).long()

Q: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
RANK: dict[str, Any] = {**Q, "r": 4}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "beft": ("BeftConfig", Q),
    "boft": ("BOFTConfig", {**Q, "boft_block_size": 4}),
    "c3a": ("C3AConfig", {**Q, "block_size": 4}),
    "deft": ("DeftConfig", RANK),
    "delora": ("DeloraConfig", RANK),
    "fourierft": ("FourierFTConfig", {**Q, "n_frequency": 10}),
    "frod": ("FrodConfig", Q),
    "glora": ("GloraConfig", RANK),
    "gralora": ("GraloraConfig", RANK),
    "hira": ("HiraConfig", RANK),
    "hra": ("HRAConfig", RANK),
    "ia3": ("IA3Config", {**Q, "feedforward_modules": []}),
    "ln_tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "loha": ("LoHaConfig", RANK),
    "lokr": ("LoKrConfig", RANK),
    "lora": ("LoraConfig", RANK),
    "miss": ("MissConfig", RANK),
    "oft": ("OFTConfig", {**Q, "r": 0, "oft_block_size": 4}),
    "osf": ("OSFConfig", Q),
    "peanut": ("PeanutConfig", RANK),
    "psoft": ("PsoftConfig", RANK),
    "randlora": ("RandLoraConfig", RANK),
    "road": ("RoadConfig", {**Q, "group_size": 4}),
    "shira": ("ShiraConfig", RANK),
    "supertuning": ("SupertuningConfig", Q),
    "tinylora": ("TinyLoraConfig", RANK),
    "trainable_tokens": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [5, 6, 20]}),
    "unilora": ("UniLoraConfig", RANK),
    "vblora": ("VBLoRAConfig", {**Q, "num_vectors": 8, "vector_length": 4, "topk": 2, "r": 2}),
    "vera": ("VeraConfig", RANK),
    "waveft": ("WaveFTConfig", {**Q, "n_frequency": 10}),
}
"""Each method's configuration class and its arguments for a tiny model."""

LORA: dict[str, dict[str, Any]] = {
    "DoRA, embedding": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]},
    "block diagonal": {"use_bdlora": lora_config.BdLoraConfig(["q_proj"], ["v_proj"], nblocks=2)},
    "KaSA": {"kasa_config": lora_config.KasaConfig()},
    "MiCA": {"init_lora_weights": "mica"},
    "biases": {"lora_bias": True, "bias": "all"},
    "head and tokens": {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [5, 6, 20]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
    "replicated layers, recomputed": {"layer_replication": [[0, 2], [1, 2]]},
}


def adapted(config: PeftConfig, family: str = "llama") -> Any:
    torch.manual_seed(0)
    model = get_peft_model(build(family), config).train()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.add_(torch.randn_like(weight) * 0.05)
    return model


def gradients(model: nn.Module, rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    for ids, mask in rows:
        logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        (-taken * mask[:, 1:] * torch.arange(1, ids.shape[1])).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_exact(model: nn.Module) -> None:
    """Compare the batch on a tree with the stock model on each row separately."""
    alone = [(IDS[i : i + 1, :n], MASK[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]
    expected = gradients(model, alone)
    patched = patch(model)
    found = gradients(model, [(IDS, MASK)])
    assert patched.take_counts().num_calls == 1
    assert found.keys() == expected.keys() != set()
    norm = sum(float(grad.square().sum()) for grad in expected.values())
    apart = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items())
    assert norm > 0
    assert (apart / norm) ** 0.5 <= 5e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_the_list_is_exact(method: str) -> None:
    kind, options = METHODS[method]
    assert_exact(adapted(getattr(peft, kind)(task_type="CAUSAL_LM", **options)))


@pytest.mark.parametrize("variant", LORA)
def test_a_variant_of_lora_is_exact(variant: str) -> None:
    family = "qwen3_moe" if variant == "experts" else "llama"
    model = adapted(LoraConfig(**{**RANK, "task_type": "CAUSAL_LM", **LORA[variant]}), family)
    if variant.endswith("recomputed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_exact(model)


def test_replicated_layers_whose_kinds_the_configuration_lacks_are_refused_until_it_names_them() -> None:
    model = adapted(LoraConfig(**{**RANK, "task_type": "CAUSAL_LM", **LORA["replicated layers"]}), "qwen3")
    with pytest.raises(UnsupportedError, match="must name every layer, got 2 names for 3 layers"):
        patch(model)
    model.config.layer_types = ["full_attention"] * 3
    assert_exact(model)


def test_the_list_has_no_method_without_a_test_and_leaves_the_others_of_peft_out() -> None:
    assert METHODS.keys() == ADAPTERS
    packages = {path.parent.name for path in Path(peft.__file__).parent.glob("tuners/*/layer.py")}
    assert {"adalora", "lily", "poly", "pvera", "xlora"} <= packages - ADAPTERS
    seen = {
        type(one).__name__
        for variant, options in LORA.items()
        if variant != "experts"
        for module in adapted(LoraConfig(**{**RANK, **options})).modules()
        for one in getattr(module, "lora_variant", {}).values()
    }
    assert seen == LORA_VARIANTS


class OwnLayer(nn.Module, peft.tuners.tuners_utils.BaseTunerLayer):
    """User-defined adapter layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def injected(config: PeftConfig) -> nn.Module:
    model = build("llama").train()
    model.add_adapter(config)
    return model


def with_own_layer() -> nn.Module:
    model = build("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj = OwnLayer(mlp.up_proj)
    return model


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: adapted(peft.LilyConfig(**RANK)), r"adapter lily of PEFT at 'model\.layers\.0\.self_attn\.q_proj'"),
        (lambda: injected(peft.LilyConfig(**RANK)), "adapter lily of PEFT at"),
        (lambda: adapted(peft.PveraConfig(**RANK)), "adapter pvera of PEFT at"),
        (
            lambda: adapted(LoraConfig(**RANK, monteclora_config=lora_config.MontecloraConfig())),
            "adapter MontecloraLinearVariant at .*or by noise, .*; use plain LoRA",
        ),
        (
            lambda: adapted(LoraConfig(**RANK, velora_config=lora_config.VeloraConfig(num_groups=4))),
            "adapter VeloraLinearVariant at .*rest of the batch",
        ),
        (with_own_layer, r"adapter OwnLayer at 'model\.layers\.1\.mlp\.up_proj'"),
    ],
)
def test_features_that_may_depend_on_the_batch_or_on_noise_are_refused_by_name(make: Any, rule: str) -> None:
    with pytest.raises(UnsupportedError, match=rule):
        patch(make())
