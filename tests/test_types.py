import json
from dataclasses import replace

import pytest

from treering.errors import ConfigError, UnsupportedError
from treering.types import NAMED_SHAPES, find_shape, read_shape

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 256,
}


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return folder


@pytest.mark.parametrize(
    ("name", "published_params", "tied", "norm_per_layer", "bias_per_layer"),
    [
        # Published totals include what a token's cost leaves out: the embedding, norms and attention biases.
        ("llama3-8b", 8_030_261_248, False, 2 * 4096, 0),
        ("qwen3-8b", 8_190_735_360, False, 2 * 4096 + 2 * 128, 0),
        ("qwen3-0.6b", 596_049_920, True, 2 * 1024 + 2 * 128, 0),
        ("qwen2.5-7b", 7_615_616_512, False, 2 * 3584, 3584 + 2 * 512),
        ("qwen2.5-0.5b", 494_032_768, True, 2 * 896, 896 + 2 * 128),
        ("llama3.2-1b", 1_235_814_400, True, 2 * 2048, 0),
    ],
)
def test_dense_shapes_hold_the_published_number_of_parameters(
    name, published_params, tied, norm_per_layer, bias_per_layer
):
    shape = NAMED_SHAPES[name]
    embedding = 0 if tied else shape.vocab_size * shape.hidden_size
    rest = shape.num_layers * (norm_per_layer + bias_per_layer) + shape.hidden_size + embedding
    assert shape.params_per_token + rest == published_params


def test_a_token_passes_the_active_experts_and_the_router_only():
    shape = NAMED_SHAPES["qwen3-30b-a3b"]
    all_experts = replace(shape, num_active_experts=128)
    rest = 48 * (2 * 2048 + 2 * 128) + 2048 + 151936 * 2048
    assert all_experts.params_per_token + rest == 30_532_122_624
    assert all_experts.params_per_token - shape.params_per_token == 48 * 120 * 3 * 2048 * 768


def test_a_config_is_read_from_its_folder_or_its_path_and_the_embedding_is_not_counted(tmp_path):
    folder = write_config(tmp_path)
    assert read_shape(folder) == read_shape(folder / "config.json") == find_shape(str(folder))
    per_layer = 256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 768
    assert read_shape(folder).params_per_token == 2 * per_layer + 256 * 256


def test_missing_head_sizes_follow_from_the_hidden_size_and_missing_kv_heads_from_the_heads(tmp_path):
    shape = read_shape(write_config(tmp_path, model_type="llama", head_dim=None, num_key_value_heads=None))
    assert (shape.head_size, shape.num_kv_heads) == (64, 4)


def test_expert_sizes_are_read_where_the_type_has_experts(tmp_path):
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
    shape = read_shape(write_config(tmp_path, **experts))
    assert (shape.intermediate_size, shape.num_experts, shape.num_active_experts) == (96, 8, 2)


def test_an_unknown_name_is_refused_with_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"got 'qwen3-8'; nearest names: .*qwen3-8b"):
        find_shape("qwen3-8")


@pytest.mark.parametrize(
    ("changes", "error", "rule"),
    [
        ({"model_type": "mamba"}, UnsupportedError, "has 'mamba'"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, UnsupportedError, "mixes dense and expert"),
        ({"hidden_size": None}, ConfigError, "hidden_size must be an integer >= 1, got None"),
        ({"vocab_size": "256"}, ConfigError, "vocab_size must be an integer >= 1, got '256'"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(tmp_path, changes, error, rule):
    with pytest.raises(error, match=rule):
        read_shape(write_config(tmp_path, **changes))


@pytest.mark.parametrize(("text", "rule"), [(None, "readable config.json"), ("{", "not JSON"), ("[]", "holds a list")])
def test_a_missing_or_broken_config_is_refused(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("change", "rule"), [({"num_layers": 0}, "num_layers"), ({"num_active_experts": 2}, "experts")]
)
def test_an_impossible_shape_is_refused(change, rule):
    with pytest.raises(ConfigError, match=rule):
        replace(NAMED_SHAPES["qwen3-8b"], **change)
