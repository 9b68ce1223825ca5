"""Command line: generate, score, logits, compare, inspect, prewarm, synth.

With ``--json`` a command writes exactly one JSON object (ASCII, no NaN) to stdout; logs, progress and errors always go
to stderr. Exit codes: 0 done; 2 the input was refused, with one line on stderr and, with ``--json``, an object with key
``error``; 130 interrupted; 1 a fault of our own (traceback) or a closed output pipe. ``generate`` serves the good
prompts of a batch: a refused one has ``error`` in its completion; the exit code is 2 only if all were refused.
"""

import dataclasses
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from rich.console import Console
from rich.logging import RichHandler

from .cli_support import (
    AllRefusedError,
    AsJson,
    Compile,
    EngineOptions,
    Numerics,
    check_finite,
    check_positive,
    check_prompts,
    choice,
    completion_payload,
    emit,
    engine_options,
    out_of_memory,
    read_json,
    show_prewarm,
    sized_for,
    token_ids,
    vocab_size,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="DeepSeek-V4 through compiled pieces of custom ops.",
)

# Newer versions of typer carry a copy of click with classes of its own; this is the one that BadParameter derives from.
_UsageError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Model = Annotated[Path, typer.Argument(help="Checkpoint directory in the official layout.")]


@app.command()
@engine_options(compile="piecewise")
def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="Prompt text; repeat for a batch.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1]; only with a temperature.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler; only with a temperature.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt as one user turn of a chat.")] = False,
    draft_tokens: Annotated[int, typer.Option(help="Tokens drafted by the MTP block per step; 0 = off.")] = 0,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens; default: 4096, doubled until every prompt fits.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text to stderr as it is generated.")] = False,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Continue prompts."""
    from .chat import encode_messages
    from .engine import Engine
    from .sampling import SamplingParams

    settings = engine.settings(
        draft_tokens=draft_tokens, **({} if max_seq_len is None else {"max_seq_len": max_seq_len})
    )
    if stream and len(prompt) > 1:
        raise ValueError(f"--stream must come with one prompt, whose text it prints as it grows, got {len(prompt)}")
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens)
    texts = [encode_messages([{"role": "user", "content": p}], thinking=False) for p in prompt] if chat else prompt
    lengths = check_prompts(model, prompt, texts, max_seq_len, max_new_tokens)
    settings = sized_for(settings, model, lengths, max_seq_len)
    on_token = (lambda event: print(event.text, end="", file=sys.stderr, flush=True)) if stream else None
    serving = Engine.from_checkpoint(model, settings)
    completions, run = serving.generate_with_stats(texts, params, on_token=on_token)
    if stream:
        print(file=sys.stderr)
    payload = {
        "completions": [completion_payload(text, c) for text, c in zip(prompt, completions, strict=True)],
        "timings": dataclasses.asdict(serving.timings) | dataclasses.asdict(run),
    }

    refused = {index: c.error for index, c in enumerate(completions) if c.error}
    if len(refused) == len(prompt):
        raise AllRefusedError(list(refused.values()), payload)
    for index, error in refused.items():
        print(f"error: prompt {index}: {error}", file=sys.stderr)

    def show(p: dict[str, Any]) -> None:
        for c in p["completions"]:
            print(f"{c['prompt']}\033[1m{c['text']}\033[0m" if sys.stdout.isatty() else f"{c['prompt']}{c['text']}")
            print()
        print(f"{run.tokens_per_second:.1f} tokens per second, {run.generated_tokens} tokens in {run.seconds:.2f} s")

    emit(as_json, payload, show)


@app.command()
@engine_options(graphs="off")
def score(
    model: Model,
    tokens: Annotated[Path, typer.Option(help="JSON list of token ids, or an object with key tokens.")],
    window: Annotated[int, typer.Option(help="Scored tokens per window.")] = 1024,
    mtp: Annotated[bool, typer.Option("--mtp", help="Also score the MTP block.")] = False,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Negative log-likelihood per window, in nats per token."""
    from . import evaluate
    from .config import ModelConfig
    from .engine import Engine

    check_positive("window", window)
    value = read_json(tokens, "tokens file")
    if isinstance(value, dict):
        if "tokens" not in value:
            raise ValueError(f"tokens file must be a list or an object with key 'tokens', got keys {sorted(value)[:8]}")
        value = value["tokens"]
    settings = engine.settings_for(window)
    if mtp:
        evaluate.check_mtp(ModelConfig.from_json(model))
    ids = token_ids(value, vocab_size(model), "tokens")
    if not evaluate.window_starts(len(ids), window):
        raise ValueError(f"tokens must be at least {window + 3} for one window of {window}, got {len(ids)}")
    result = evaluate.score(Engine.from_checkpoint(model, settings).runner, ids, window=window, mtp=mtp)
    payload: dict[str, Any] = {"nll": result.nll, "nll_per_window": result.nll_per_window, "window": window}
    if mtp:
        payload |= {"mtp_nll": result.mtp_nll, "mtp_nll_per_window": result.mtp_nll_per_window}

    def show(p: dict[str, Any]) -> None:
        mtp_text = f", MTP {p['mtp_nll']:.6f}" if mtp else ""
        number = len(p["nll_per_window"])
        print(f"NLL {p['nll']:.6f}{mtp_text} over {number} {'window' if number == 1 else 'windows'} of {window}")

    emit(as_json, payload, show)


@app.command()
@engine_options(graphs="off")
def logits(
    model: Model,
    prompts: Annotated[Path, typer.Option(help="JSON list of token id lists.")],
    out: Annotated[Path, typer.Option(help="safetensors file to write.")],
    chunk: Annotated[int | None, typer.Option(help="Prefill chunk in tokens; default: in one go.")] = None,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """fp32 last-token logits of every prompt, under logits_<index>."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from . import evaluate
    from .engine import Engine

    check_positive("chunk", chunk)
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"out must be a file in an existing directory, got {out}")
    lists = read_json(prompts, "prompts file")
    if not isinstance(lists, list) or not lists:
        got = "an empty list" if lists == [] else type(lists).__name__
        raise ValueError(f"prompts file must hold a non-empty list of token id lists, got {got}")
    vocab = vocab_size(model)
    lists = [token_ids(ids, vocab, f"prompt {index}") for index, ids in enumerate(lists)]
    settings = engine.settings_for(max(map(len, lists)), chunk=chunk)
    runner = Engine.from_checkpoint(model, settings).runner
    found = {f"logits_{index}": evaluate.last_logits(runner, ids, chunk=chunk) for index, ids in enumerate(lists)}
    for name, value in found.items():
        check_finite(value.sum().item(), name)
    try:
        save_file({name: value.float().contiguous() for name, value in found.items()}, out)
    except SafetensorError as error:
        raise ValueError(f"out must be a writable file, got {out}: {error}") from error
    payload = {"out": str(out), "prompts": len(found), "vocab": vocab}
    emit(as_json, payload, lambda p: print(f"{p['prompts']} rows of {p['vocab']} logits in {p['out']}"))


@app.command()
@engine_options("graphs", "debug_graphs", "compile_cache", numerics="official", graphs="off")
def compare(
    model: Model,
    layers: Annotated[Path, typer.Option(help="safetensors file of recorded sublayer inputs and outputs.")],
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Run each recorded sublayer alone, eagerly (compile off), and report its distance from the record."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from . import evaluate
    from .engine import Engine

    choice("compile", engine.compile, ("off",))  # pieces of the whole model would compile and stay unused
    try:
        recorded = load_file(layers)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"layers file must be a readable safetensors file, got {layers}: {error}") from error
    longest = max((t.numel() for name, t in recorded.items() if name.endswith(".ids")), default=1)
    settings = engine.settings_for(longest)
    result = evaluate.compare(Engine.from_checkpoint(model, settings).runner, recorded)

    def show(p: dict[str, Any]) -> None:
        for name, value in p["layers"].items():
            print(f"{value:10.6f}  {name}")
        print("worst:", ", ".join(f"{kind} {value:.6f}" for kind, value in p["worst"].items()))

    emit(as_json, dataclasses.asdict(result), show)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, or a config.json alone.")],
    numerics: Numerics = "exact",
    compile: Compile = "piecewise",
    as_json: AsJson = False,
) -> None:
    """What the traced model is made of; needs no weights."""
    from .engine_config import CompileMode
    from .execution import NumericsMode
    from .inspection import inspect_model

    choice("compile", compile, get_args(CompileMode))
    choice("numerics", numerics, get_args(NumericsMode))
    payload = inspect_model(model, numerics=numerics, mode=compile)

    def show(p: dict[str, Any]) -> None:
        print(f"parameters {p['parameters']:,}   bytes {p['bytes']:,}   ops {len(p['ops'])}")
        print(f"graph breaks {p['graph_breaks']}   recompiles {p['recompiles']}")
        print(f"pieces {p['pieces']}   distinct {p['distinct_pieces']}   cut at {', '.join(p['boundary_ops'])}")
        for name, count in sorted(p["op_calls"].items(), key=lambda item: -item[1]):
            print(f"{count:6d}  {name}")

    emit(as_json, payload, show)


@app.command()
@engine_options(
    "compile", "graphs", "debug_graphs", "compile_cache", "deterministic",
    compile="off", numerics="official", device="cuda",
)  # fmt: skip
def prewarm(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory, or a config.json alone.")],
    token_budget: Annotated[int, typer.Option(help="Most rows of a step.")] = 8192,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Compile and load every kernel of a model; needs no weights."""
    from .config import ModelConfig
    from .prewarming import library_counts, warm_kernels

    settings = engine.settings(token_budget=token_budget)
    if engine.device == "cpu":
        raise ValueError("device must be a GPU for a prewarm, got cpu: its references have nothing to warm")
    report = warm_kernels(ModelConfig.from_json(model), settings)
    libraries = library_counts(report)
    emit(as_json, report.to_dict() | {"libraries": libraries}, lambda _: show_prewarm(report, libraries))


@app.command()
def synth(
    config: Annotated[Path, typer.Argument(help="config.json or a directory holding one.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; must not hold files.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights, in [0, 2**63).")] = 0,
    layers: Annotated[int | None, typer.Option(help="Override num_hidden_layers.")] = None,
    experts: Annotated[int | None, typer.Option(help="Override n_routed_experts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic checkpoint in the official layout, with the tokenizer that lies beside the config, if any."""
    from .config import ModelConfig
    from .synth import write_synthetic

    overrides = {"num_hidden_layers": layers, "n_routed_experts": experts}
    report = write_synthetic(
        ModelConfig.from_json(config), out, seed=seed, tokenizer_dir=config if config.is_dir() else config.parent,
        **{k: v for k, v in overrides.items() if v is not None},
    )  # fmt: skip
    payload = {"out": str(out)} | dataclasses.asdict(report)

    def show(p: dict[str, Any]) -> None:
        copied = " and ".join(p["copied"]) or "no tokenizer"
        print(f"{p['parameters']:,} parameters, {p['tensors']} tensors in {p['bytes']:,} bytes; copied {copied}")

    emit(as_json, payload, show)


def _end(argv: list[str], code: int, message: str, payload: dict[str, Any] | None = None) -> NoReturn:
    """One line on stderr; with ``--json`` an object with key ``error`` on stdout."""
    message = " ".join(message.splitlines())
    if message:  # a call without a command has had the help text instead
        print(f"error: {message}", file=sys.stderr)
    if "--json" in argv:
        print(json.dumps({"error": message} | (payload or {})), flush=True)
    sys.exit(code)


def _run(argv: list[str]) -> NoReturn:
    try:
        code = app(argv, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = 130  # what newer versions of typer return for Ctrl-C
    except (ValueError, NotImplementedError) as error:
        _end(argv, 2, str(error), getattr(error, "payload", None))
    except BrokenPipeError:
        raise
    except (MemoryError, RuntimeError) as error:
        if (message := out_of_memory(error)) is None:
            raise
        _end(argv, 2, message)
    except OSError as error:
        _end(argv, 2, f"{error.filename or 'files'} must be accessible, got: {error.strerror or error}")
    except _UsageError as error:
        _end(argv, 2, error.format_message())
    if code == 130:
        _end(argv, code, "interrupted")
    sys.exit(code or 0)


def main(argv: list[str] | None = None) -> NoReturn:
    """Console entry: one line for a refused input, a traceback only for our own faults."""
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("dsv4").setLevel(logging.INFO)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # text that the terminal cannot show must not end the program
            output.reconfigure(errors="backslashreplace")
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # the reader has left; the interpreter's own last flush must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
