"""What the command line refuses: exit code 2 and one line, before any weight is read wherever that is possible."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import cache_sizing, checkpoint
from dsv4.cli import main
from dsv4.engine import Engine
from dsv4.start_up import CaptureMemoryError

from .command_line import GOLDEN, NANO, parse, refused, run, write_json

TOKENS = list(range(3, 22))


@pytest.fixture
def no_weights(monkeypatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint, "_read_tensor", read)


GENERATE = ("generate", NANO, "--prompt", "The")
ARGUMENTS = [
    (("nothing",), "No such command"),
    (("generate", NANO, "--prompt", "x", "--nothing", "1"), "No such option"),
    (("generate", NANO), "Missing"),
    (("score", NANO), "Missing"),
    ((*GENERATE, "--max-new-tokens", "many"), "--max-new-tokens"),
    ((*GENERATE, "--numerics", "fast"), "numerics must be one of ['exact', 'official'], got 'fast'"),
    ((*GENERATE, "--compile", "on"), "compile must be one of ['off', 'piecewise', 'full'], got 'on'"),
    ((*GENERATE, "--device", "tpu"), "device must be cpu, cuda or cuda:<index>, got 'tpu'"),
    ((*GENERATE, "--device", "cpu:x"), "device must be cpu, cuda or cuda:<index>, got 'cpu:x'"),
    ((*GENERATE, "--device", "cuda"), "device must be one that torch can use, got cuda"),
    ((*GENERATE, "--device", "cuda:1"), "device must be one that torch can use, got cuda:1"),
    ((*GENERATE, "--graphs", "full"), "graphs must be left out on cpu, where it has no effect, got 'full'"),
    (
        (*GENERATE, "--mhc-backend", "tilelang"),
        "mhc_backend must be left out on cpu, where it has no effect, got 'tilelang'",
    ),
    ((*GENERATE, "--gemm-backend", "deep_gemm"), "gemm_backend must be left out on cpu, where it has no effect"),
    ((*GENERATE, "--expert-weights", "fp8"), "expert_weights must be left out with numerics 'exact', where it has no"),
    (
        (*GENERATE, "--compile", "off", "--compile-cache", "x"),
        "compile_cache must be left out with compile 'off', where",
    ),
    ((*GENERATE, "--top-p", 0.9), "top_p must be left out with temperature 0, where it has no effect, got 0.9"),
    ((*GENERATE, "--seed", 1), "seed must be left out with temperature 0, where it has no effect, got 1"),
    ((*GENERATE, "--graphs", "on"), "graphs must be one of ['off', 'piecewise', 'full', 'auto'], got 'on'"),
    ((*GENERATE, "--mhc-backend", "cute"), "mhc_backend must be one of ['triton', 'tilelang'], got 'cute'"),
    ((*GENERATE, "--gemm-backend", "cute"), "gemm_backend must be one of ['triton', 'deep_gemm'], got 'cute'"),
    ((*GENERATE, "--max-seq-len", 60), "prompt and max_new_tokens must be at most 60 tokens together, got 2 + 64"),
    (("prewarm", NANO, "--device", "cpu"), "device must be a GPU for a prewarm, got cpu"),
    ((*GENERATE, "--max-new-tokens", 0), "max_new_tokens must be an int >= 1, got 0"),
    ((*GENERATE, "--max-seq-len", 1), "max_seq_len must be an integer of at least 2, a prompt and a new token, got 1"),
    ((*GENERATE, "--max-seq-len", 2), "prompt and max_new_tokens must be at most 2 tokens together, got 2 + 64"),
    ((*GENERATE, "--compile-cache", NANO / "config.json"), "config.json: File exists"),
    ((*GENERATE, "--compile-cache", NANO / "config.json" / "below"), "config.json/below: Not a directory"),
    ((*GENERATE, "--compile-cache", "/proc/none"), "compile_cache must be a directory to write to, got /proc/none: "),
    ((*GENERATE, "--max-seq-len", 0), "max_seq_len must be an integer of at least 2, a prompt and a new token, got 0"),
    ((*GENERATE, "--max-seq-len", 2**21), "max_seq_len must be at most max_position_embeddings 1048576"),
    ((*GENERATE, "--draft-tokens", 8), "draft_tokens must be in [0, 7], got 8"),
    ((*GENERATE, "--top-p", 0), "top_p must be in (0, 1], got 0.0"),
    ((*GENERATE, "--top-p", 2), "top_p must be in (0, 1], got 2.0"),
    ((*GENERATE, "--top-p", "nan"), "top_p must be in (0, 1], got nan"),
    ((*GENERATE, "--temperature", -1), "temperature must be a finite number >= 0, got -1.0"),
    ((*GENERATE, "--temperature", "inf"), "temperature must be a finite number >= 0, got inf"),
    ((*GENERATE, "--seed", -1), "seed must be None or in [0, 2**63), got -1"),
    (("generate", "/no/such/model", "--prompt", "x"), "/no/such/model must be accessible, got: No such file"),
    (("compare", NANO, "--layers", "/no/such/file"), "layers file must be a readable safetensors file"),
    (("compare", NANO, "--layers", NANO / "config.json"), "layers file must be a readable safetensors file"),
    (("compare", NANO, "--layers", NANO), "layers file must be a readable safetensors file"),
    (("compare", NANO, "--layers", "x", "--compile", "full"), "compile must be one of ['off'], got 'full'"),
    (("inspect", NANO, "--compile", "on"), "compile must be one of"),
    (("inspect", NANO, "--numerics", "fast"), "numerics must be one of"),
]


@pytest.mark.parametrize("argv, message", ARGUMENTS, ids=[message[:40] for _, message in ARGUMENTS])
def test_arguments(capfd, no_weights, argv, message):
    assert message in refused(capfd, *argv)


def test_without_json_stdout_stays_empty(capfd, no_weights):
    code, out, err = run(capfd, *GENERATE, "--device", "cuda")
    assert code == 2 and out == ""
    assert err == "error: device must be one that torch can use, got cuda without a usable GPU\n"


def refused_prompts(capfd, *argv: object) -> dict:
    code, out, err = run(capfd, *argv, "--json")
    found = parse(out)
    assert code == 2 and err.splitlines()[-1] == f"error: {found['error']}"
    return found


def test_prompts_are_checked_before_weights_are_read(capfd, no_weights, tmp_path):
    found = refused_prompts(capfd, *GENERATE, "--prompt", "word " * 80, "--max-seq-len", 64)
    assert [c["prompt"] for c in found["completions"]] == ["The", "word " * 80]
    assert all("at most 64 tokens together" in c["error"] for c in found["completions"])
    shutil.copy(NANO / "config.json", tmp_path)
    message = refused(capfd, "generate", tmp_path, "--prompt", "The")
    assert message == f"a checkpoint directory must hold tokenizer.json, got {str(tmp_path)!r}"


def test_caches_that_cannot_be_are_refused_before_weights_are_read(capfd, no_weights, monkeypatch):
    monkeypatch.setattr(cache_sizing, "_host_bytes", lambda: 2**30)
    many = refused(capfd, *GENERATE, "--prompt", "And", "--max-new-tokens", 1_000_000)
    size = r"caches must fit into host memory of 1.00 GiB, got \d+.\d\d GiB for 7814 blocks of 256 tokens"
    assert re.fullmatch(f"{size}: lower max_new_tokens, or the length or number of prompts", many)


def test_a_bad_config_is_named(capfd, no_weights, tmp_path):
    values = json.loads((NANO / "config.json").read_text())
    path = write_json(tmp_path / "config.json", values | {"hidden_size": -4})
    message = refused(capfd, "generate", tmp_path, "--prompt", "The")
    assert message == f"{path}: hidden_size must be a positive integer, got -4"


MEMORY = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total capacity of 8 GiB."),
     "device memory must hold weights, caches and steps, got: CUDA out of memory; try a smaller max_seq_len"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried"),
     "host memory must hold weights, caches and steps, got: [enforce fail"),
    (MemoryError(), "host memory must hold weights, caches and steps, got: MemoryError"),
    (CaptureMemoryError("bucket of 8 tokens: capture must fit into device memory"), "; or choose graphs 'off'"),
]  # fmt: skip


@pytest.mark.parametrize("error, message", MEMORY, ids=[type(error).__name__ for error, _ in MEMORY])
def test_no_memory(capfd, monkeypatch, error, message):
    def from_checkpoint(*_: object) -> None:
        raise error

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    assert message in refused(capfd, *GENERATE)


def test_other_faults_keep_their_traceback(monkeypatch):
    def from_checkpoint(*_: object) -> None:
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    with pytest.raises(RuntimeError, match="a fault of our own"):
        main([str(argument) for argument in GENERATE])


# ---- token files -----------------------------------------------------------------------------------------------------


BAD_JSON = ["", "[1, 2", "[" * 100_000]
BAD_TOKENS = [
    (3, "tokens must be a non-empty list of token ids, got int"),
    ([], "tokens must be a non-empty list of token ids, got an empty list"),
    ("text", "tokens must be a non-empty list of token ids, got str"),
    ({"ids": TOKENS}, "tokens file must be a list or an object with key 'tokens', got keys ['ids']"),
    ({"tokens": None}, "tokens must be a non-empty list of token ids, got NoneType"),
    ([*TOKENS, "5"], "token id at index 19 must be an integer in [0, 2048), got '5'"),
    ([1.0, *TOKENS], "token id at index 0 must be an integer in [0, 2048), got 1.0"),
    ([True, *TOKENS], "token id at index 0 must be an integer in [0, 2048), got True"),
    ([TOKENS], "token id at index 0 must be an integer in [0, 2048), got [3,"),
    ([*TOKENS, 2048], "token id at index 19 must be an integer in [0, 2048), got 2048"),
    ([*TOKENS, -1], "token id at index 19 must be an integer in [0, 2048), got -1"),
    ([*TOKENS, 10**30], "token id at index 19 must be an integer in [0, 2048), got 1000"),
    (TOKENS[:18], "tokens must be at least 19 for one window of 16, got 18"),
]


def score(path: Path, *flags: object) -> tuple[object, ...]:
    return "score", NANO, "--tokens", path, "--window", 16, *flags


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:8])
def test_score_invalid_json(capfd, no_weights, tmp_path, text):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    assert f"tokens file must be JSON, got {path}: " in refused(capfd, *score(path))


def test_score_of_drafts_that_nobody_makes(capfd, no_weights, tmp_path):
    values = json.loads((NANO / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    write_json(tmp_path / "config.json", values)
    argv = ("score", tmp_path, "--tokens", write_json(tmp_path / "tokens.json", TOKENS), "--window", 16, "--mtp")
    message = refused(capfd, *argv)
    assert message == "mtp scoring needs a model with an MTP block, got num_nextn_predict_layers 0"


def test_score_unreadable_files(capfd, no_weights, tmp_path):
    assert "must be a readable file, got /no/such/file: No such file" in refused(capfd, *score(Path("/no/such/file")))
    assert "must be a readable file" in refused(capfd, *score(tmp_path))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "tokens file must be JSON" in refused(capfd, *score(binary))


@pytest.mark.parametrize("value, message", BAD_TOKENS, ids=lambda value: str(value)[:24])
def test_score_tokens(capfd, no_weights, tmp_path, value, message):
    assert message in refused(capfd, *score(write_json(tmp_path / "tokens.json", value)))


@pytest.mark.parametrize("window", [0, -1])
def test_score_window(capfd, no_weights, tmp_path, window):
    path = write_json(tmp_path / "tokens.json", TOKENS)
    assert f"window must be at least 1 token, got {window}" in refused(capfd, *score(path, "--window", window))


BAD_PROMPTS = [
    ({"prompts": [TOKENS]}, "prompts file must hold a non-empty list of token id lists, got dict"),
    ([], "prompts file must hold a non-empty list of token id lists, got an empty list"),
    ([TOKENS, []], "prompt 1 must be a non-empty list of token ids, got an empty list"),
    (TOKENS, "prompt 0 must be a non-empty list of token ids, got int"),
    ([TOKENS, [5, 2048]], "prompt 1: token id at index 1 must be an integer in [0, 2048), got 2048"),
    ([[0.5]], "prompt 0: token id at index 0 must be an integer in [0, 2048), got 0.5"),
]


def logits(prompts: Path, out: Path, *flags: object) -> tuple[object, ...]:
    return "logits", NANO, "--prompts", prompts, "--out", out, *flags


@pytest.mark.parametrize("value, message", BAD_PROMPTS, ids=lambda value: str(value)[:24])
def test_logits_prompts(capfd, no_weights, tmp_path, value, message):
    out = tmp_path / "logits.safetensors"
    assert message in refused(capfd, *logits(write_json(tmp_path / "prompts.json", value), out))
    assert not out.exists()


@pytest.mark.parametrize("chunk", [0, -1])
def test_logits_chunk(capfd, no_weights, tmp_path, chunk):
    prompts = write_json(tmp_path / "prompts.json", [TOKENS])
    message = refused(capfd, *logits(prompts, tmp_path / "out", "--chunk", chunk))
    assert f"chunk must be at least 1 token, got {chunk}" in message


def test_logits_out_must_be_writable(capfd, no_weights, tmp_path):
    prompts = write_json(tmp_path / "prompts.json", [TOKENS])
    for out in (tmp_path, tmp_path / "absent" / "out"):
        assert f"out must be a file in an existing directory, got {out}" in refused(capfd, *logits(prompts, out))


# ---- layer files -----------------------------------------------------------------------------------------------------


def without(*names: str):
    return lambda record: {name: value for name, value in record.items() if name not in names}


def having(**changes: torch.Tensor):
    return lambda record: record | {name.replace("__", "."): value for name, value in changes.items()}


IN, OUT = "p140.layer0.attn_in", "p140.layer0.attn_out"
BAD_LAYERS = [
    (lambda _: {"weight": torch.ones(2)}, "layers file must hold names like 'p40.layer2.attn_in', got ['weight']"),
    (without(IN), "layers file must hold names like"),
    (without("p140.ids"), f"{IN}: the file must also hold p140.ids"),
    (without(OUT), f"{IN}: the file must also hold {OUT}"),
    (having(p140__ids=torch.tensor([5, 2048])), "token id at index 1 must be an integer in [0, 2048), got 2048"),
    (having(p140__ids=torch.tensor(5)), "p140.ids must have shape [tokens], got []"),
    (having(p140__ids=torch.rand(140)), "token id at index 0 must be an integer"),
    (having(p140__layer0__attn_in=torch.rand(140, 255)), f"{IN} must have shape [140, 256], got [140, 255]"),
    (having(p140__layer0__attn_out=torch.rand(1, 256)), f"{OUT} must have shape [140, 256], got [1, 256]"),
    (having(p140__layer7__attn_in=torch.rand(140, 256)), "layer must be in [0, 7), got 7"),
    (having(p140__layer0__attn_out=torch.zeros(140, 256)), f"{OUT} must be finite, got inf"),
    (
        lambda r: r | {"p140.layer0.attn.indexer.score": torch.rand(140, 35)},
        "index scores need a layer of ratio 4, got ratio 0",
    ),
]


@pytest.mark.parametrize("change, message", BAD_LAYERS, ids=[message[:40] for _, message in BAD_LAYERS])
def test_layers(capfd, tmp_path, change, message):
    record = load_file(GOLDEN / "layers_official.safetensors")
    record = change({name: record[name] for name in ("p140.ids", IN, OUT)})
    save_file(record, tmp_path / "layers.safetensors")
    assert message in refused(capfd, "compare", NANO, "--layers", tmp_path / "layers.safetensors")


# ---- synth -----------------------------------------------------------------------------------------------------------


SYNTH = [
    ((NANO / "absent", "out"), "must be accessible, got: No such file or directory"),
    ((NANO / "tokenizer_config.json", "out"), "config must have the key"),
    ((NANO, "out", "--layers", 0), "num_hidden_layers must be an integer in 1...7 (the model's layers), got 0"),
    ((NANO, "out", "--experts", 2), "num_experts_per_tok must be at most n_routed_experts (2), got 6"),
    ((NANO, "."), "output directory must be absent or empty"),
    ((NANO, "out", "--seed", -1), "seed must be an integer in [0, 2**63), got -1"),
    ((NANO, "out", "--seed", 2**63), f"seed must be an integer in [0, 2**63), got {2**63}"),
]


@pytest.mark.parametrize("argv, message", SYNTH, ids=[message[:40] for _, message in SYNTH])
def test_synth(capfd, tmp_path, argv, message):
    (tmp_path / "file").write_text("kept")
    config, out, *flags = argv
    assert message in refused(capfd, "synth", config, tmp_path / out, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
