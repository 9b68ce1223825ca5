"""The table of tensors against published counts, and everything that must be refused before data is read."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dsv4 import checkpoint as module
from dsv4.checkpoint import Checkpoint, CheckpointError, expected_tensors
from dsv4.config import ModelConfig, flash_config, pro_config

from .tiny_checkpoint import (
    INDEX,
    NANO,
    Raw,
    contents,
    copy,
    find,
    load_raw,
    save_raw,
    save_shard,
    write_file,
    write_tiny,
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "intact")


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    return copy(intact, tmp_path / "damaged")


def refused(directory: Path, message: str) -> None:
    """Opening must fail with ``message``, read no tensor data, and leave the files alone."""
    before, opened = contents(directory), None
    with pytest.raises(CheckpointError) as error:
        opened = Checkpoint.open(directory)
    assert message in str(error.value)
    assert opened is None and contents(directory) == before


@pytest.fixture(autouse=True)
def no_data_while_opening(monkeypatch, request):
    """Reading tensor data fails, except in the tests that are about reading."""
    if "reads" in request.node.name:
        return

    def read(*_: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(module, "_read_tensor", read)


CENSUS = {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34167, "I64": 3, "I8": 33792}
MTP_CENSUS = {"BF16": 8, "F32": 11, "F8_E4M3": 10, "F8_E8M0": 778, "I8": 768}


@pytest.fixture(scope="module")
def flash_table() -> dict:
    return expected_tensors(flash_config())


def test_flash_census(flash_table):
    table = flash_table
    assert len(table) == 69_187
    assert Counter(spec.dtype for spec in table.values()) == CENSUS
    assert Counter(spec.dtype for name, spec in table.items() if name.startswith("mtp.")) == MTP_CENSUS


def test_pro_census():
    table = expected_tensors(pro_config())
    assert len(table) == 145_116
    sizes = {"F32": 4, "BF16": 2, "I64": 8}
    total = sum(math.prod(spec.shape) * sizes.get(spec.dtype, 1) for spec in table.values())
    assert total == 864_704_792_696  # total_size of the published index


FLASH_SHAPES = {
    "embed.weight": ((129280, 4096), "BF16"),
    "hc_head_fn": ((4, 16384), "F32"),
    "layers.0.attn.wq_b.scale": ((256, 8), "F8_E8M0"),
    "layers.0.attn.wo_a.weight": ((8192, 4096), "F8_E4M3"),
    "layers.2.hc_ffn_fn": ((24, 16384), "F32"),
    "layers.2.ffn.gate.tid2eid": ((129280, 6), "I64"),
    "layers.3.ffn.gate.bias": ((256,), "F32"),
    "layers.2.attn.compressor.wkv.weight": ((1024, 4096), "BF16"),
    "layers.2.attn.compressor.ape": ((4, 1024), "F32"),
    "layers.2.attn.indexer.wq_b.weight": ((8192, 1024), "F8_E4M3"),
    "layers.2.attn.indexer.compressor.wgate.weight": ((256, 4096), "BF16"),
    "layers.3.attn.compressor.ape": ((128, 512), "F32"),
    "layers.3.attn.compressor.wgate.weight": ((512, 4096), "BF16"),
    "layers.7.ffn.experts.255.w1.weight": ((2048, 2048), "I8"),
    "layers.7.ffn.experts.255.w2.scale": ((4096, 64), "F8_E8M0"),
    "mtp.0.e_proj.weight": ((4096, 4096), "F8_E4M3"),
    "mtp.0.norm.weight": ((4096,), "BF16"),
}


@pytest.mark.parametrize("name", FLASH_SHAPES)
def test_flash_shapes(flash_table, name):
    spec = flash_table[name]
    assert (spec.shape, spec.dtype) == FLASH_SHAPES[name]


@pytest.mark.parametrize(
    "name",
    ["layers.2.ffn.gate.bias", "layers.3.ffn.gate.tid2eid", "layers.1.attn.compressor.ape", "mtp.0.embed.weight",
     "layers.3.attn.indexer.wq_b.weight", "mtp.0.attn.compressor.ape", "layers.43.attn.attn_sink"],
)  # fmt: skip
def test_names_that_flash_lacks(flash_table, name):
    assert name not in flash_table


def test_nano_opens_and_reads():
    opened = Checkpoint.open(NANO)
    assert opened.config == ModelConfig.from_json(NANO)
    assert len(opened.entries) == 1057
    names = ["embed.weight", "layers.2.attn.wq_b.weight", "layers.0.ffn.gate.tid2eid", "hc_head_scale"]
    with opened.reader() as read:
        for name in names:
            with safe_open(NANO / opened.entries[name].shard, "pt") as file:
                expected = file.get_tensor(name)
            got = read(name)
            assert got.dtype == expected.dtype and torch.equal(got.float(), expected.float())
        assert read("layers.2.attn.wq_b.scale").dtype == torch.uint8
        assert read("layers.2.ffn.experts.0.w1.weight").dtype == torch.uint8


def test_single_file(damaged):
    shards = load_raw(damaged)
    merged = {name: raw for tensors in shards.values() for name, raw in tensors.items()}
    save_raw(damaged, {})
    (damaged / INDEX).unlink()
    refused(damaged, "must hold model.safetensors.index.json or model.safetensors, got neither")
    save_shard(damaged / "model.safetensors", merged)
    assert Checkpoint.open(damaged).entries.keys() == merged.keys()


def test_symbolic_links_open(intact, tmp_path):
    """Download caches link every file to a folder elsewhere."""
    for path in intact.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert len(Checkpoint.open(tmp_path).entries) == len(Checkpoint.open(intact).entries)


def test_missing_shard(damaged):
    (damaged / sorted(load_raw(damaged))[1]).unlink()
    refused(damaged, "must hold the shard model-00002-of-0")


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_shard(damaged, cut):
    path = damaged / sorted(load_raw(damaged))[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    refused(damaged, f"{path.name} must have {size} bytes, got {size - cut} (truncated)")


def test_truncated_header(damaged):
    path = damaged / sorted(load_raw(damaged))[0]
    for size in (0, 7, 8, 100):
        path.write_bytes(path.read_bytes()[:size])
        refused(damaged, f"{path.name} must hold its whole header")


def test_trailing_bytes(damaged):
    path = damaged / sorted(load_raw(damaged))[0]
    path.write_bytes(path.read_bytes() + b"\0")
    refused(damaged, "(too long)")


def test_huge_header_length(damaged):
    path = damaged / sorted(load_raw(damaged))[0]
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    refused(damaged, f"{path.name} must hold its whole header (18446744073709551615 bytes)")


BAD_HEADERS = [
    (b"{not json", "must be valid JSON"),
    (b"\xff\xfe{}", "must be valid JSON"),
    (b"[]", "must be a JSON object, got list"),
    ({"norm.weight": None}, "tensor norm.weight in {shard} must have dtype, shape and data_offsets, got None"),
    ({"norm.weight": {"dtype": "BF16", "shape": [4]}}, "must have dtype, shape and data_offsets, got {{"),
    ({"norm.weight": {"dtype": "BF16", "shape": [-4], "data_offsets": [0, 8]}}, "must have dtype, shape and"),
    ({"norm.weight": {"dtype": ["BF16"], "shape": [4], "data_offsets": [0, 8]}}, "must have dtype, shape and"),
    ({"norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8, 9]}}, "must have dtype, shape and"),
    ({"norm.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 8]}}, "must have a dtype of ['BF16',"),
    ({"norm.weight": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 8]}}, "must have 10 bytes, got offsets"),
    ({"norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}}, "must start at byte"),
]


@pytest.mark.parametrize("header, message", BAD_HEADERS, ids=[str(i) for i in range(len(BAD_HEADERS))])
def test_corrupt_header(damaged, header, message):
    shard = sorted(load_raw(damaged))[0]
    write_file(damaged / shard, header, b"\0" * 8)
    refused(damaged, message.format(shard=shard))


def test_overlapping_tensors(damaged):
    shard = sorted(load_raw(damaged))[0]
    entry = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
    write_file(damaged / shard, {"norm.weight": entry, "embed.weight": entry}, b"\0" * 8)
    refused(damaged, f"in {shard} must start at byte")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 3, "a\\b"])
def test_path_outside_the_directory(damaged, shard):
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"]["norm.weight"] = shard
    (damaged / INDEX).write_text(json.dumps(index))
    refused(damaged, f"must name files of its own directory, got {shard!r} for tensor norm.weight")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_bad_index(damaged, text):
    (damaged / INDEX).write_text(text)
    refused(damaged, INDEX)


def test_tensor_absent_from_its_shard(damaged):
    index = json.loads((damaged / INDEX).read_text())
    shard = index["weight_map"]["norm.weight"]
    index["weight_map"]["layers.0.attn.phantom"] = shard
    (damaged / INDEX).write_text(json.dumps(index))
    refused(damaged, f"{INDEX} must list tensors that its shards hold, got layers.0.attn.phantom")


def test_tensor_absent_from_the_index(damaged):
    index = json.loads((damaged / INDEX).read_text())
    shard = index["weight_map"].pop("norm.weight")
    (damaged / INDEX).write_text(json.dumps(index))
    refused(damaged, f"index shard of tensor norm.weight must be {shard}, which holds it, got none")


def test_missing_tensor(damaged):
    shards = load_raw(damaged)
    for name in ("layers.2.attn.wkv.scale", "hc_head_base"):
        del find(shards, name)[name]
    save_raw(damaged, shards)
    refused(damaged, "must hold the config's tensors, got none for hc_head_base, layers.2.attn.wkv.scale")


def test_unexpected_tensors(damaged):
    shards = load_raw(damaged)
    shard = next(iter(shards.values()))
    for number in range(7):
        shard[f"layers.9.extra.{number}"] = Raw("F32", [2], b"\0" * 8)
    save_raw(damaged, shards)
    shown = ", ".join(f"layers.9.extra.{number}" for number in range(5))
    refused(damaged, f"must hold no tensors besides the config's, got {shown} and 2 more")


def test_missing_mtp_block(damaged):
    shards = load_raw(damaged)
    for tensors in shards.values():
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]
    save_raw(damaged, shards)
    refused(damaged, "must hold the MTP block (num_nextn_predict_layers is 1), got no tensor named mtp.0.*")


def test_wrong_shape(damaged):
    shards = load_raw(damaged)
    find(shards, "norm.weight")["norm.weight"] = Raw("BF16", [95], b"\0" * 190)
    save_raw(damaged, shards)
    refused(damaged, "tensor norm.weight must have shape [96], got [95]")


@pytest.mark.parametrize(
    "name, allowed, wrong, itemsize",
    [
        ("norm.weight", "BF16", "F32", 4),
        ("layers.0.ffn.gate.tid2eid", "I64", "F32", 4),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", "F32", 4),
        ("layers.0.ffn.experts.0.w1.scale", "F8_E8M0", "I8", 1),
        ("layers.0.ffn.experts.0.w1.weight", "I8", "F8_E4M3", 1),
    ],
)
def test_wrong_dtype(damaged, name, allowed, wrong, itemsize):
    shards = load_raw(damaged)
    raw = find(shards, name)[name]
    find(shards, name)[name] = Raw(wrong, raw.shape, b"\0" * math.prod(raw.shape) * itemsize)
    save_raw(damaged, shards)
    refused(damaged, f"tensor {name} must have dtype {allowed}, got {wrong}")


def test_fp8_experts_may_have_float32_scales(tmp_path):
    directory = write_tiny(tmp_path / "base", expert_dtype="fp8")
    assert Checkpoint.open(directory).entries["layers.0.ffn.experts.0.w1.weight"].dtype == "F8_E4M3"
    shards, name = load_raw(directory), "layers.0.ffn.experts.0.w1.scale"
    raw = find(shards, name)[name]
    find(shards, name)[name] = Raw("F32", raw.shape, b"\0\0\x80\x3f" * math.prod(raw.shape))
    save_raw(directory, shards)
    assert Checkpoint.open(directory).entries[name].dtype == "F32"
    find(shards, name)[name] = Raw("BF16", raw.shape, b"\x80\x3f" * math.prod(raw.shape))
    save_raw(directory, shards)
    refused(directory, f"tensor {name} must have dtype F8_E8M0 or F32, got BF16")


def test_bad_config_is_refused_first(damaged):
    values = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(values | {"hidden_size": 0}))
    (damaged / INDEX).unlink()
    with pytest.raises(ValueError, match="hidden_size must be a positive integer, got 0"):
        Checkpoint.open(damaged)


def test_reads_of_a_file_cut_after_opening(damaged):
    opened = Checkpoint.open(damaged)
    last = max(opened.entries, key=lambda name: (opened.entries[name].shard, opened.entries[name].offset))
    path = damaged / opened.entries[last].shard
    path.write_bytes(path.read_bytes()[:-1])
    with opened.reader() as read, pytest.raises(CheckpointError, match=f"tensor {last} in {path.name} must have"):
        read(last)
