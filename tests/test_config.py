"""The config: the published models, every refused value, and the sibling releases that are refused by name."""

import json
import logging
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest

from dsv4.config import (
    ModelConfig,
    QuantizationConfig,
    RopeScaling,
    default_compile_cache,
    flash_config,
    prewarm_enabled,
    pro_config,
)
from dsv4.ops import shapes

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "assets" / "nano"


@pytest.fixture
def values() -> dict:
    return json.loads((NANO / "config.json").read_text())


def refused(values: dict, message: str, **changes: object) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(values | changes)
    assert str(error.value) == message


def test_published_models():
    flash, pro = flash_config(), pro_config()
    assert flash.num_parameters == 290_942_289_362
    assert pro.num_parameters == 1_598_837_347_742
    assert len(flash.compress_ratios) == 44 and len(pro.compress_ratios) == 62
    assert [flash.layer_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert [pro.layer_ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    assert flash.mtp_ratio == pro.mtp_ratio == 0
    assert [i for i in range(43) if flash.is_hash_layer(i)] == [0, 1, 2]


def test_committed_files_are_the_builtin_configs():
    assert ModelConfig.from_json(ROOT / "assets" / "configs" / "flash") == flash_config()
    assert ModelConfig.from_json(ROOT / "assets" / "configs" / "pro" / "config.json") == pro_config()


def test_shapes():
    assert flash_config().shape() == shapes.flash
    assert pro_config().shape() == shapes.pro
    assert ModelConfig.from_json(NANO).shape() == shapes.nano
    odd = ModelConfig.from_json(NANO).resized(n_routed_experts=12).shape()
    assert (odd.name, odd.num_experts, odd.hidden) == ("custom", 12, 256)


def test_round_trip(values):
    config = ModelConfig.from_dict(values)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(ModelConfig.from_dict(config.to_dict())) == hash(config)
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1


def test_longer_ratio_lists_are_truncated(values):
    longer = values | {"compress_ratios": values["compress_ratios"] + [0, 4]}
    assert ModelConfig.from_dict(longer) == ModelConfig.from_dict(values)


def test_expert_dtype_defaults_to_fp4(values):
    del values["expert_dtype"]
    assert ModelConfig.from_dict(values).expert_dtype == "fp4"
    assert ModelConfig.from_dict(values | {"expert_dtype": "fp8"}).expert_dtype == "fp8"


def test_missing_key(values):
    for name in [f.name for f in fields(ModelConfig) if f.default is MISSING]:
        fewer = {key: value for key, value in values.items() if key != name}
        refused(fewer, f"config must have the key {name}, got none")


INTEGERS = [f.name for f in fields(ModelConfig) if f.type is int and "fixed" not in f.metadata]
FLOATS = [f.name for f in fields(ModelConfig) if f.type is float]
FIXED = [f.name for f in fields(ModelConfig) if "fixed" in f.metadata]


def test_every_field_has_a_kind():
    others = {"compress_ratios", "rope_scaling", "quantization_config", "expert_dtype"}
    assert {f.name for f in fields(ModelConfig)} == {*INTEGERS, *FLOATS, *FIXED, *others}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-1, True, 2.0, "4", None])
def test_integers(values, name, value):
    from_zero = name in ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id")
    rule = "be an integer >= 0" if from_zero else "be a positive integer"
    refused(values, f"{name} must {rule}, got {value!r}", **{name: value})
    if not from_zero:
        refused(values, f"{name} must {rule}, got 0", **{name: 0})


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [0.0, -1e-6, float("nan"), float("inf"), True, "1", None])
def test_floats(values, name, value):
    refused(values, f"{name} must be a positive finite number, got {value!r}", **{name: value})


@pytest.mark.parametrize("name", [name for name in FIXED if name != "model_type"])
def test_fixed_values(values, name):
    right = values[name]
    wrong = {str: "other", bool: not right, int: 2}[type(right)]
    for value in (wrong, None, [right]):
        refused(values, f"{name} must be {right!r}, got {value!r}", **{name: value})
    if isinstance(right, bool):
        refused(values, f"{name} must be {right!r}, got {int(right)!r}", **{name: int(right)})


CONSISTENCY = [
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, got 63"),
    ({"qk_rope_head_dim": 512}, "head_dim must exceed qk_rope_head_dim (512), got 512"),
    ({"index_head_dim": 32}, "index_head_dim must be at least qk_rope_head_dim (64), got 32"),
    ({"index_head_dim": 96}, "index_head_dim must be a power of two (Hadamard rotation), got 96"),
    ({"o_groups": 3}, "num_attention_heads must be a multiple of o_groups (3), got 4"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok must be at most n_routed_experts (16), got 17"),
    ({"num_hash_layers": 8}, "num_hash_layers must be at most num_hidden_layers (7), got 8"),
    ({"hidden_size": 250}, "hidden_size must be a multiple of 32 (FP4 block), got 250"),
    ({"moe_intermediate_size": 130}, "moe_intermediate_size must be a multiple of 32 (FP4 block), got 130"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1, got 2"),
    ({"bos_token_id": 2048}, "bos_token_id must be below vocab_size (2048), got 2048"),
    ({"eos_token_id": 9999}, "eos_token_id must be below vocab_size (2048), got 9999"),
    (
        {"max_position_embeddings": 4096},
        "max_position_embeddings must be at least rope_scaling.original_max_position_embeddings (65536), got 4096",
    ),
    ({"expert_dtype": "bf16"}, "expert_dtype must be 'fp4' or 'fp8', got 'bf16'"),
    (
        {"compress_ratios": [0] * 7},
        "compress_ratios must have at least num_hidden_layers + num_nextn_predict_layers = 8 entries, got 7",
    ),
    ({"compress_ratios": [0, 0, 4, 64, 4, 128, 4, 0]}, "compress_ratios[3] must be one of [0, 4, 128], got 64"),
    ({"compress_ratios": [False, 0, 4, 4, 4, 128, 4, 0]}, "compress_ratios[0] must be one of [0, 4, 128], got False"),
    ({"compress_ratios": [0, 0, 4, 128, 4, 128, 4, 4]}, "compress_ratios[7] (the MTP block) must be 0, got 4"),
    ({"compress_ratios": "00444440"}, "compress_ratios must be a list of integers, got '00444440'"),
    ({"rope_scaling": None}, "rope_scaling must be a JSON object, got None"),
    ({"quantization_config": []}, "quantization_config must be a JSON object, got []"),
    ({"model_type": "llama"}, "model_type must be 'deepseek_v4', got 'llama'"),
]


@pytest.mark.parametrize("changes, message", CONSISTENCY, ids=[message[:40] for _, message in CONSISTENCY])
def test_consistency(values, changes, message):
    refused(values, message, **changes)


NESTED = [
    ("rope_scaling", {"type": "linear"}, "rope_scaling.type must be 'yarn', got 'linear'"),
    ("rope_scaling", {"factor": 0.5}, "rope_scaling.factor must be at least 1, got 0.5"),
    ("rope_scaling", {"beta_slow": 32}, "rope_scaling.beta_fast must exceed rope_scaling.beta_slow (32), got 32"),
    ("rope_scaling", {"beta_slow": 0}, "rope_scaling.beta_slow must be a positive finite number, got 0"),
    (
        "rope_scaling",
        {"original_max_position_embeddings": 1.5},
        "rope_scaling.original_max_position_embeddings must be a positive integer, got 1.5",
    ),
    (
        "rope_scaling",
        {"mscale": 1.0},
        "rope_scaling must have only the keys ['type', 'factor', 'beta_fast', 'beta_slow', "
        "'original_max_position_embeddings'], got ['mscale']",
    ),
    ("quantization_config", {"quant_method": "awq"}, "quantization_config.quant_method must be 'fp8', got 'awq'"),
    ("quantization_config", {"fmt": "e5m2"}, "quantization_config.fmt must be 'e4m3', got 'e5m2'"),
    ("quantization_config", {"scale_fmt": None}, "quantization_config.scale_fmt must be 'ue8m0', got None"),
    (
        "quantization_config",
        {"activation_scheme": "static"},
        "quantization_config.activation_scheme must be 'dynamic', got 'static'",
    ),
    (
        "quantization_config",
        {"weight_block_size": [64, 128]},
        "quantization_config.weight_block_size must be (128, 128), got (64, 128)",
    ),
]


@pytest.mark.parametrize("name, changes, message", NESTED, ids=[message[:48] for _, _, message in NESTED])
def test_nested(values, name, changes, message):
    refused(values, message, **{name: values[name] | changes})


def test_nested_missing_key(values):
    scaling = {key: value for key, value in values["rope_scaling"].items() if key != "factor"}
    refused(values, "rope_scaling must have the key factor, got none", rope_scaling=scaling)


def test_nested_must_be_dataclasses(values):
    picked = {f.name: getattr(ModelConfig.from_dict(values), f.name) for f in fields(ModelConfig)}
    with pytest.raises(ValueError, match="rope_scaling must be a RopeScaling, got {"):
        ModelConfig(**picked | {"rope_scaling": values["rope_scaling"]})
    with pytest.raises(ValueError, match="quantization_config must be a QuantizationConfig, got None"):
        ModelConfig(**picked | {"quantization_config": None})
    assert isinstance(picked["rope_scaling"], RopeScaling) and picked["quantization_config"] == QuantizationConfig()


def test_dspark_is_refused_by_name(values):
    with pytest.raises(ValueError, match=r"got DSpark keys \['dspark_block_size'\]: V4-Flash-0731 replaces"):
        ModelConfig.from_dict(values | {"dspark_block_size": 5, "compress_ratios": values["compress_ratios"] + [0, 0]})


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "deepseek_v4_1"}, {"engram_layers": [1]}, {"hidden_size": 5120, "num_hidden_layers": 40}],
    ids=["model_type", "engram", "widths"],
)
def test_v41_is_refused_by_name(values, changes):
    with pytest.raises(ValueError, match="config must be of DeepSeek-V4, got .*: V4.1 is another architecture"):
        ModelConfig.from_dict(values | changes)


def test_unused_keys_are_logged(values, caplog):
    with caplog.at_level(logging.WARNING, "dsv4.config"):
        ModelConfig.from_dict(values)
        assert caplog.messages == []
        ModelConfig.from_dict(values | {"n_group": 8, "topk_group": 4})
    assert caplog.messages == ["config keys not used: n_group, topk_group"]


def test_resized():
    flash = flash_config()
    small = flash.resized(num_hidden_layers=4, n_routed_experts=8)
    assert small.compress_ratios == (0, 0, 4, 128, 0) and small.layer_ratios == (0, 0, 4, 128)
    assert (small.num_hidden_layers, small.n_routed_experts, small.num_hash_layers) == (4, 8, 3)
    assert flash.resized(num_hidden_layers=2).num_hash_layers == 2
    assert flash.resized() == flash
    for layers in (0, 44, True, 2.0):
        with pytest.raises(ValueError, match=r"num_hidden_layers must be an integer in 1\.\.\.43 \(the model"):
            flash.resized(num_hidden_layers=layers)
    with pytest.raises(ValueError, match="override must be a field of ModelConfig, got 'n_experts'"):
        flash.resized(n_experts=8)
    with pytest.raises(ValueError, match="num_experts_per_tok must be at most n_routed_experts"):
        flash.resized(n_routed_experts=4)


def test_no_mtp_block(values):
    config = ModelConfig.from_dict(values | {"num_nextn_predict_layers": 0})
    assert config.compress_ratios == config.layer_ratios == tuple(values["compress_ratios"][:7])
    with pytest.raises(ValueError, match="num_nextn_predict_layers must be 1 for an MTP block, got 0"):
        config.mtp_ratio


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_json(tmp_path / "config.json")
    for text, message in (("{", "must be valid JSON"), ("[1]", r"config must be a JSON object, got \[1\]")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="config.json must be valid JSON"):
        ModelConfig.from_json(tmp_path)


def test_compile_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_compile_cache() == tmp_path / "dsv4" / "compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_compile_cache() == tmp_path / "home" / ".cache" / "dsv4" / "compile"


def test_prewarm_switch(monkeypatch):
    monkeypatch.delenv("DSV4_PREWARM", raising=False)
    assert prewarm_enabled()
    for value, enabled in (("1", True), ("0", False)):
        monkeypatch.setenv("DSV4_PREWARM", value)
        assert prewarm_enabled() is enabled
    for value in ("", "no", "false"):
        monkeypatch.setenv("DSV4_PREWARM", value)
        with pytest.raises(ValueError, match=f"DSV4_PREWARM must be '0' or '1', got '{value}'"):
            prewarm_enabled()
