"""How much cache ``dsv4 generate`` asks for, and how long the steps are that evaluation asks for."""

import pytest
import torch
from safetensors.torch import save_file

from dsv4.config import default_compile_cache
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.runner import Runner

from .command_line import NANO, refused, run_json, write_json

CACHE = str(default_compile_cache())
SIZES = [  # prompts, flags; limit, requests, blocks
    (["a"], (), (4096, 1, 1)),
    (["word " * 400, "a", "a"], (), (4096, 3, 4)),  # 403 + 64 and twice 2 + 64 tokens
    (["a"] * 11, (), (4096, 8, 8)),
    (["a", "b"], ("--max-new-tokens", 5000), (8192, 2, 40)),
    (["a"], ("--max-new-tokens", 1_000_000), (2**20, 1, 3907)),
    (["a", "", "word " * 400], ("--max-seq-len", 300), (300, 1, 1)),  # what is refused needs no cache
    (["a"], ("--max-seq-len", 2**20), (2**20, 1, 1)),
]


@pytest.mark.parametrize("prompts, flags, sizes", SIZES, ids=lambda value: str(value)[:24])
def test_caches_follow_the_prompts(capfd, monkeypatch, prompts, flags, sizes):
    asked: list[EngineConfig] = []

    def from_checkpoint(path, settings: EngineConfig) -> None:
        asked.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    assert refused(capfd, "generate", NANO, *given, *flags) == "seen"
    limit, requests, blocks = sizes
    sized = {"max_seq_len": limit, "max_requests": requests, "num_blocks": blocks}
    assert asked == [EngineConfig(compile_cache=CACHE, graphs="auto", **sized)]


def test_caches_of_exactly_what_is_needed_suffice(capfd):
    """Two sequences of one block each, to its last row, with drafts until the end."""
    argv = ("--prompt", "word " * 247, "--prompt", "And " * 247, "--max-new-tokens", 6, "--draft-tokens", 3)
    found = run_json(capfd, "generate", NANO, "--compile", "off", *argv)["completions"]
    assert [(c["prompt_tokens"], len(c["token_ids"]), c["error"]) for c in found] == [(250, 6, None)] * 2


LENGTH = 1030  # more than the default token budget
STEPS = [  # command, flags; rows of the longest step, token budget
    ("logits", (), (LENGTH, LENGTH)),
    ("logits", ("--chunk", 1026), (1026, 1026)),
    ("logits", ("--chunk", 400), (400, 1024)),
    ("logits", ("--chunk", 5000), (LENGTH, LENGTH)),
    ("score", ("--window", 1027, "--mtp"), (1027, 1027)),
    ("score", ("--window", 100), (100, 1024)),
    ("compare", (), (LENGTH, LENGTH)),
]


@pytest.mark.parametrize("command, flags, sizes", STEPS, ids=str)
def test_budgets_hold_the_steps_of_an_evaluation(capfd, monkeypatch, tmp_path, command, flags, sizes):
    """What is beyond the budget is never warmed, and a step of a sealed process must not meet it."""
    ids, rows, budgets = [3 + n % 99 for n in range(LENGTH)], [], []
    inputs, load = Runner.inputs, Engine.from_checkpoint

    def counted(self, segments, **pads):
        rows.append(sum(len(segment.token_ids) for segment in segments))
        return inputs(self, segments, **pads)

    def noted(path, settings: EngineConfig) -> Engine:
        budgets.append(settings.token_budget)
        return load(path, settings)

    monkeypatch.setattr(Runner, "inputs", counted)
    monkeypatch.setattr(Engine, "from_checkpoint", noted)
    x = torch.ones(LENGTH, 256)
    record = {"p0.ids": torch.tensor(ids), "p0.layer0.ffn_in": x, "p0.layer0.ffn_out": x.clone()}
    save_file(record, tmp_path / "layers")
    files = {
        "logits": ("--prompts", write_json(tmp_path / "prompts", [ids[:5], ids]), "--out", tmp_path / "out"),
        "score": ("--tokens", write_json(tmp_path / "tokens", ids)),
        "compare": ("--layers", tmp_path / "layers"),
    }
    run_json(capfd, command, NANO, *files[command], *flags)
    assert (max(rows), *budgets) == sizes
