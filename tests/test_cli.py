"""Every command through the console entry: recorded values, the documented JSON keys, and what goes to which stream."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import evaluate
from dsv4.cli import main
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.runner import Runner

from .command_line import GOLDEN, NANO, ROOT, parse, refused, run, run_json, write_json

LOGITS_ATOL = 5e-4
COMMANDS = ("generate", "score", "logits", "compare", "inspect", "prewarm", "synth")
COMPLETION_KEYS = {
    "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "drafted_tokens",
    "accepted_tokens", "error",
}  # fmt: skip
TIMING_KEYS = {
    "load_seconds", "trace_seconds", "compile_seconds", "piece_load_seconds", "seconds", "steps", "rows",
    "generated_tokens", "drafted_tokens", "accepted_tokens",
}  # fmt: skip


def generate(capfd, *argv: object) -> dict:
    return run_json(capfd, "generate", NANO, "--compile", "off", "--max-seq-len", 256, *argv)


# ---- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--deterministic",), ("--draft-tokens", 2)], ids=str)
def test_generate(capfd, golden, flags):
    records = golden("exact_greedy.json")[:2]
    prompts = [argument for record in records for argument in ("--prompt", record["prompt"])]
    found = generate(capfd, *prompts, "--max-new-tokens", 10, *flags)
    assert set(found) == {"completions", "timings"}
    for completion, record in zip(found["completions"], records, strict=True):
        assert set(completion) == COMPLETION_KEYS
        assert completion["prompt"] == record["prompt"]
        assert completion["token_ids"] == record["continuation"][:10]
        assert record["text"].startswith(record["prompt"] + completion["text"])
        assert completion["finish_reason"] == "length" and completion["error"] is None
        assert completion["prompt_tokens"] == len(record["prompt_ids"]) and completion["cached_tokens"] == 0
        assert (completion["drafted_tokens"] > 0) == ("--draft-tokens" in flags)
    assert set(found["timings"]) == TIMING_KEYS
    assert found["timings"]["generated_tokens"] == 20 and found["timings"]["load_seconds"] > 0
    assert found["timings"]["compile_seconds"] == 0


def test_generate_for_people(capfd):
    code, out, _ = run(
        capfd, "generate", NANO, "--prompt", "Ge 1:1 In the beginning", "--max-new-tokens", 3, "--compile", "off"
    )
    assert code == 0
    text, _, rate = out.strip().splitlines()
    assert text == "Ge 1:1 In the beginning of the reign"
    assert "tokens per second, 3 tokens in" in rate


@pytest.mark.slow
def test_seed(capfd):
    def sampled(seed: int, *flags: object) -> list[int]:
        drawn = ("--prompt", "The ", "--temperature", 1.5, "--max-new-tokens", 6)
        return generate(capfd, *drawn, "--seed", seed, *flags)["completions"][0]["token_ids"]

    first = sampled(5)
    assert sampled(5) == first
    assert sampled(6) != first
    assert sampled(5, "--top-p", 0.01) != first


def test_chat_wraps_the_prompt(capfd):
    plain = generate(capfd, "--prompt", "Who?", "--max-new-tokens", 2)["completions"][0]
    chat = generate(capfd, "--prompt", "Who?", "--max-new-tokens", 2, "--chat")["completions"][0]
    assert chat["prompt"] == "Who?"
    assert chat["prompt_tokens"] > plain["prompt_tokens"]


def test_stream_goes_to_stderr(capfd):
    code, out, err = run(
        capfd, "generate", NANO, "--prompt", "The LORD", "--max-new-tokens", 6, "--compile", "off", "--stream", "--json"
    )
    assert code == 0
    text = parse(out)["completions"][0]["text"]
    assert len(text) > 5 and f"{text}\n" in err


def test_a_refused_prompt_leaves_the_others(capfd):
    argv = ("generate", NANO, "--compile", "off", "--max-seq-len", 64, "--max-new-tokens", 2)
    code, out, err = run(capfd, *argv, "--prompt", "", "--prompt", "The", "--prompt", "word " * 80, "--json")
    assert code == 0
    empty, served, long = parse(out)["completions"]
    assert empty["error"] == "prompt must have at least 1 character, got an empty text"
    assert served["error"] is None and len(served["token_ids"]) == 2
    assert "at most 64 tokens together" in long["error"]
    assert empty["token_ids"] == long["token_ids"] == [] and empty["finish_reason"] is None
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert lines == [f"error: prompt 0: {empty['error']}", f"error: prompt 2: {long['error']}"]


def test_all_prompts_refused(capfd):
    code, out, err = run(capfd, "generate", NANO, "--compile", "off", "--prompt", "", "--json")
    found = parse(out)
    assert code == 2
    assert found["error"] == "prompt 0: prompt must have at least 1 character, got an empty text"
    assert found["completions"][0]["error"] in found["error"]
    assert err.splitlines()[-1] == f"error: {found['error']}"


def test_any_bytes_can_be_a_prompt_or_an_output(capfd):
    """Text outside ASCII arrives escaped; bytes that are no UTF-8 (a lone surrogate in Python) are refused by name."""
    text = "naïve 文字 😀\u2028"
    found = generate(capfd, "--prompt", text, "--prompt", "a\udcffb", "--max-new-tokens", 1)
    assert found["completions"][0]["prompt"] == text and found["completions"][0]["error"] is None
    assert "text must be valid Unicode" in found["completions"][1]["error"]


# ---- score, logits, compare ------------------------------------------------------------------------------------------


# Per-window MTP values are this library's; their mean over all windows is the recorded one (tests/test_exact.py).
MTP_WINDOWS = (2.876160, 2.948548)


def test_score_with_mtp(capfd, golden, tmp_path):
    record = golden("exact_nll.json")
    tokens = write_json(tmp_path / "tokens.json", record["tokens"][: 2 * 1024 + 3])
    found = run_json(capfd, "score", NANO, "--tokens", tokens, "--mtp")
    assert set(found) == {"nll", "nll_per_window", "window", "mtp_nll", "mtp_nll_per_window"}
    assert found["window"] == 1024
    assert found["nll_per_window"] == pytest.approx(record["nll_per_window"][:2], abs=1e-4)
    assert found["mtp_nll_per_window"] == pytest.approx(MTP_WINDOWS, abs=1e-4)
    assert found["nll"] == pytest.approx(sum(found["nll_per_window"]) / 2)
    assert found["mtp_nll"] == pytest.approx(sum(found["mtp_nll_per_window"]) / 2)


def test_score_reads_lists_and_objects(capfd, golden, tmp_path):
    tokens = golden("exact_nll.json")["tokens"][:131]
    plain = write_json(tmp_path / "list.json", tokens)
    keyed = write_json(tmp_path / "object.json", {"source": "text", "tokens": tokens})
    found = run_json(capfd, "score", NANO, "--tokens", plain, "--window", 64)
    assert set(found) == {"nll", "nll_per_window", "window"} and len(found["nll_per_window"]) == 2
    assert run_json(capfd, "score", NANO, "--tokens", keyed, "--window", 64) == found
    code, out, _ = run(capfd, "score", NANO, "--tokens", keyed, "--window", 64)
    assert code == 0 and out == f"NLL {found['nll']:.6f} over 2 windows of 64\n"
    code, out, _ = run(capfd, "score", NANO, "--tokens", keyed, "--window", 128)
    assert code == 0 and out.endswith(" over 1 window of 128\n")


def logits(capfd, tmp_path, prompts: list[list[int]], *flags: object) -> dict[str, torch.Tensor]:
    source, out = write_json(tmp_path / "prompts.json", prompts), tmp_path / "logits.safetensors"
    found = run_json(capfd, "logits", NANO, "--prompts", source, "--out", out, *flags)
    assert found == {"out": str(out), "prompts": len(prompts), "vocab": 2048}
    return load_file(out)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.dtype == torch.float32 and got.shape == want.shape and got.isfinite().all()
    return (got - want).abs().max().item()


@pytest.mark.parametrize("flags, rows", [((), {2, 128, 300}), (("--chunk", 64), {2, 64, 300 % 64})], ids=str)
def test_logits(capfd, golden, tmp_path, monkeypatch, flags, rows):
    steps, step = set(), Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, s, **rest: steps.add(len(s[0].token_ids)) or step(self, s, **rest))
    indices = (1, 8, 12)  # 2, 128 and 300 tokens
    got = logits(capfd, tmp_path, [golden("prompts.json")[index] for index in indices], *flags)
    assert list(got) == ["logits_0", "logits_1", "logits_2"]
    for number, index in enumerate(indices):
        want = golden("exact_logits.safetensors")[f"logits_{index}"]
        assert distance(got[f"logits_{number}"], want) <= LOGITS_ATOL
    assert steps == rows


def test_logits_official(capfd, golden, tmp_path):
    """One token attends to itself only, so that no rounding flips; exact numerics would be far away."""
    got = logits(capfd, tmp_path, golden("prompts.json")[:1], "--numerics", "official")["logits_0"]
    assert distance(got, golden("official_logits.safetensors")["logits_0"]) <= LOGITS_ATOL
    assert distance(got, golden("exact_logits.safetensors")["logits_0"]) > 0.1


@pytest.mark.slow
def test_logits_deterministic(capfd, golden, tmp_path):
    prompts = [golden("prompts.json")[8]]  # 128 tokens; without the flag the last bits differ
    whole, chunks = (logits(capfd, tmp_path, prompts, "--deterministic", *f) for f in ((), ("--chunk", 37)))
    assert all(torch.equal(whole[name], chunks[name]) for name in whole)


# Largest distance that summation order alone explains; wrong quantisation lies beyond (tests/golden/README.md).
BOUNDS = {"attn_out": 0.010, "ffn_out": 0.006, "index_score": 0.03, "picks_changed": 0.003}


def test_compare(capfd):
    layers = GOLDEN / "layers_official.safetensors"
    found = run_json(capfd, "compare", NANO, "--layers", layers)
    assert set(found) == {"layers", "worst"} and set(found["worst"]) == set(BOUNDS)
    assert all(found["worst"][kind] <= bound for kind, bound in BOUNDS.items())
    assert len(found["layers"]) == 7 * 2 + 3 * 2
    for kind in BOUNDS:
        assert found["worst"][kind] == max(v for name, v in found["layers"].items() if name.endswith(kind))
    exact = run_json(capfd, "compare", NANO, "--layers", layers, "--numerics", "exact")["worst"]
    assert all(exact[kind] > bound for kind, bound in BOUNDS.items())


KERNEL_FLAGS = ("--device", "cuda", "--mhc-backend", "tilelang", "--gemm-backend", "deep_gemm",
                "--expert-weights", "fp8")  # fmt: skip
ALL_FLAGS = ("--numerics", "official", "--deterministic", "--compile", "full", "--compile-cache", "pieces",
             "--graphs", "full", "--debug-graphs", *KERNEL_FLAGS)  # fmt: skip


def test_flags_reach_the_engine(capfd, monkeypatch, tmp_path):
    """The engine that every command asks for: all flags, as much cache as the input needs, one request at a time."""
    tokens = write_json(tmp_path / "tokens.json", list(range(3, 40)))
    prompts = write_json(tmp_path / "prompts.json", [[5], [5, 6, 7]])
    asked: list[EngineConfig] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def from_checkpoint(path, settings: EngineConfig) -> None:
        asked.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    for command, *argv in (
        ("generate", "--prompt", "x", "--draft-tokens", 1, "--max-seq-len", 77),
        ("score", "--tokens", tokens, "--window", 32),
        ("logits", "--prompts", prompts, "--out", tmp_path / "out"),
    ):
        assert refused(capfd, command, NANO, *argv, *ALL_FLAGS) == "seen"
    layers = ("--layers", GOLDEN / "layers_official.safetensors", *KERNEL_FLAGS)
    assert refused(capfd, "compare", NANO, *layers, "--deterministic") == "seen"
    flags = {
        "numerics": "official", "deterministic": True, "compile": "full", "compile_cache": "pieces", "graphs": "full",
        "debug_graphs": True, "device": "cuda", "mhc_backend": "tilelang", "gemm_backend": "deep_gemm",
        "expert_weights": "fp8",
    }  # fmt: skip
    assert asked[:3] == [
        EngineConfig(**flags, max_seq_len=77, draft_tokens=1, max_requests=1),
        EngineConfig(**flags, max_seq_len=32, max_requests=1),
        EngineConfig(**flags, max_seq_len=3, max_requests=1),
    ]
    flags |= {"compile": "off", "compile_cache": None, "graphs": "off", "debug_graphs": False}
    assert asked[3:] == [EngineConfig(**flags, max_seq_len=300, max_requests=1)]


# ---- synth -----------------------------------------------------------------------------------------------------------


def test_synth_writes_a_checkpoint_that_loads(capfd, tmp_path):
    out = tmp_path / "synthetic"
    found = run_json(capfd, "synth", NANO, out, "--layers", 3, "--experts", 7, "--seed", 4)
    assert set(found) == {"out", "tensors", "shards", "bytes", "parameters", "copied"} and found["out"] == str(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert found["bytes"] == index["metadata"]["total_size"] and found["tensors"] == len(index["weight_map"])
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["n_routed_experts"]) == (3, 7)
    prompts, file = write_json(tmp_path / "prompts.json", [[5, 6, 7]]), tmp_path / "logits.safetensors"
    run_json(capfd, "logits", out, "--prompts", prompts, "--out", file)
    assert load_file(file)["logits_0"].isfinite().all()
    assert found["copied"] == ["tokenizer.json", "tokenizer_config.json"]
    served = run_json(capfd, "generate", out, "--prompt", "And", "--compile", "off", "--max-new-tokens", 3)
    assert len(served["completions"][0]["token_ids"]) == 3


def test_synth_of_a_config_alone(capfd, tmp_path):
    """Nothing to copy: text prompts are then refused by name."""
    (tmp_path / "config.json").write_bytes((NANO / "config.json").read_bytes())
    argv = ("synth", tmp_path / "config.json", tmp_path / "out", "--layers", 1)
    code, stdout, _ = run(capfd, *argv)
    assert code == 0 and re.fullmatch(
        r"6,147,470 parameters, 266 tensors in 6,151,336 bytes; copied no tokenizer\n", stdout
    )
    assert "tokenizer.json" in refused(capfd, "generate", tmp_path / "out", "--prompt", "And")


# ---- help, streams, interruption -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help(capfd, command):
    code, out, err = run(capfd, command, "--help")
    assert code == 0 and err == ""
    assert "Usage:" in out and "--json" in out


def test_help_lists_every_command(capfd):
    code, out, _ = run(capfd, "--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command} " in out
    code, out, err = run(capfd)
    assert code == 2 and "Usage:" in out + err


def process(*argv: object, **options: object) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # buffered output, as a user's pipe has it
    command = [sys.executable, "-m", "dsv4", *map(str, argv)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)


def test_logs_and_progress_stay_off_stdout(tmp_path):
    tokens = write_json(tmp_path / "tokens.json", list(range(3, 22)))
    command = process("score", NANO, "--tokens", tokens, "--window", 16, "--json", stdout=subprocess.PIPE, cwd=tmp_path)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert parse(out)["nll"] > 0
    assert "loading weights" in err and "INFO" in err


@pytest.mark.parametrize("layers", [0, 1])
def test_closed_pipe(tmp_path, layers):
    """The reader has left before the first byte: exit code 1 and no traceback, from a refusal and from a success."""
    read, write = os.pipe()
    os.close(read)
    command = process("synth", NANO, tmp_path / "out", "--layers", layers, "--json", stdout=write)
    os.close(write)
    _, err = command.communicate(timeout=120)
    assert command.returncode == 1
    assert (tmp_path / "out" / "config.json").exists() == (layers > 0)
    assert "Traceback" not in err and "Exception ignored" not in err


def small_score(tmp_path) -> tuple[object, ...]:
    tokens = write_json(tmp_path / "tokens.json", list(range(3, 22)))
    return "score", NANO, "--tokens", tokens, "--window", 16


def raising(error: BaseException):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_interrupt(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "score", raising(KeyboardInterrupt()))
    code, out, err = run(capfd, *small_score(tmp_path), "--json")
    assert code == 130 and parse(out) == {"error": "interrupted"}
    assert err.splitlines()[-1] == "error: interrupted" and "Traceback" not in err


def test_our_own_faults_keep_their_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "score", raising(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        main([str(argument) for argument in small_score(tmp_path)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("flag", ["--json", "--deterministic"])
def test_a_result_that_is_not_finite_is_refused(capfd, monkeypatch, tmp_path, value, flag):
    monkeypatch.setattr(evaluate, "score", lambda *_, **__: evaluate.Score(1.0, [1.0, value], None, None))
    code, out, err = run(capfd, *small_score(tmp_path), flag)
    assert code == 2 and f"result.nll_per_window.1 must be finite, got {value}" in err
    assert "NaN" not in out and "Infinity" not in out
