"""What the commands of ``cli.py`` share: an engine's options, checked reading of files, and one way to print."""

import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from .completion import Completion
    from .engine_config import EngineConfig
    from .prewarming import PrewarmReport

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
Numerics = Annotated[str, typer.Option(help="exact (no activation or KV quantisation) or official.")]
Compile = Annotated[str, typer.Option(help="off, piecewise or full.")]


def _folder(text: str) -> Path:
    """``Path("")`` would be the current directory."""
    if not text:
        raise typer.BadParameter("must be a directory, got ''")
    return Path(text)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of every command that makes an engine; the fields are the options, with their help and defaults."""

    numerics: Numerics = "exact"
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Row results independent of the batch, bitwise.")
    ] = False
    compile: Compile = "off"
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:<index>.")] = "cpu"
    graphs: Annotated[str, typer.Option(help="CUDA graphs: off, piecewise, full or auto.")] = "auto"
    debug_graphs: Annotated[
        bool, typer.Option("--debug-graphs", help="Compare the addresses that graphs read before every replay; slow.")
    ] = False
    mhc_backend: Annotated[str, typer.Option(help="Hyper-connection kernels on CUDA: triton or tilelang.")] = "triton"
    gemm_backend: Annotated[str, typer.Option(help="FP8 product kernels on CUDA: triton or deep_gemm.")] = "triton"
    expert_weights: Annotated[str, typer.Option(help="FP4 experts in memory: fp4, or (official) fp8 without loss.")] = (
        "fp4"
    )
    compile_cache: Annotated[
        Path | None,
        typer.Option(parser=_folder, help="Directory of compiled pieces; default: in the user's cache directory."),
    ] = None

    def settings(self, **more: Any) -> "EngineConfig":
        """Of an engine; ``more`` are fields that have no option here.

        Raises:
            ValueError, NotImplementedError: naming the option, its rule and its value. An option that can have no
                effect beside the others is refused too (``dsv4.options``).
        """
        from .config import default_compile_cache
        from .engine_config import CompileMode, EngineConfig
        from .execution import NumericsMode

        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:<index>, got {self.device!r}")
        choice("numerics", self.numerics, get_args(NumericsMode))
        choice("compile", self.compile, get_args(CompileMode))
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        cache = self.compile_cache or (default_compile_cache() if self.compile != "off" else None)
        return EngineConfig(**given | {"compile_cache": None if cache is None else str(cache)} | more)

    def settings_for(self, longest: int, *, chunk: int | None = None) -> "EngineConfig":
        """Of an engine that only evaluates, one sequence of up to ``longest`` tokens at a time.

        Nothing cuts its steps to the token budget, of ``chunk`` tokens or of whole sequences. But kernels are warmed
        for no longer steps, so the budget holds the longest one.
        """
        from .engine_config import EngineConfig

        budget = max(EngineConfig.token_budget, min(longest, chunk or longest))
        return self.settings(max_seq_len=max(longest, 2), max_requests=1, token_budget=budget)


def engine_options(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of :class:`EngineOptions`, which it receives as its argument ``engine``.

    Args:
        without: options that make no sense for the command.
        defaults: in place of those of the fields.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(EngineOptions, include_extras=True)
        added = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[f.name],
                              default=defaults.get(f.name, f.default))
            for f in fields(EngineOptions) if f.name not in without
        ]  # fmt: skip

        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = {p.name: given.pop(p.name) for p in added}
            command(**given, engine=EngineOptions(**defaults | options))

        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(command).parameters.values()]
        parameters = [p for p in own if p.name not in ("engine", "as_json")]
        parameters += added + [p for p in own if p.name == "as_json"]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")
    return value


def emit(as_json: bool, payload: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    check_finite(payload, "result")
    if as_json:
        print(json.dumps(payload, allow_nan=False))
    else:
        show(payload)
    sys.stdout.flush()  # a closed pipe must fail here, not while the interpreter shuts down


def check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}: weights or recorded values out of range")
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        check_finite(each, f"{name}.{key}")


def read_json(path: Path, subject: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{subject} must be a readable file, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} must be JSON, got {path}: {error}") from error


def vocab_size(model: Path) -> int:
    """Lets token ids be checked before any weight is read."""
    from .config import ModelConfig

    return ModelConfig.from_json(model).vocab_size


def token_ids(value: Any, vocab_size: int, subject: str) -> list[int]:
    from .inputs import check_token_ids

    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{subject} must be a non-empty list of token ids, got {got}")
    check_token_ids(value, vocab_size, subject)
    return value


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value}")


class AllRefusedError(ValueError):
    """No prompt of a batch can be served; ``payload`` has each one's reason."""

    def __init__(self, errors: Sequence[str], payload: dict[str, Any]) -> None:
        super().__init__("; ".join(f"prompt {index}: {error}" for index, error in enumerate(errors)))
        self.payload = payload


def completion_payload(prompt: str, completion: "Completion") -> dict[str, Any]:
    return {"prompt": prompt, **{k: v for k, v in asdict(completion).items() if k != "request_id"}}


def check_prompts(
    model: Path, prompts: Sequence[str], texts: Sequence[str], max_seq_len: int | None, max_new_tokens: int
) -> list[int]:
    """Refuse a batch before any weight is read, if its tokenizer is absent or none of its prompts can be served.

    Args:
        model: checkpoint directory.
        prompts: as given.
        texts: as the model gets them, one per prompt.
        max_seq_len: as given.
        max_new_tokens: of every prompt.

    Returns:
        Tokens, prompt and completion together, of every prompt that can be served.
    """
    from .completion import Completion
    from .config import ModelConfig
    from .prompts import encode_prompt
    from .scheduler import check_length
    from .tokenizer import Tokenizer

    longest = max_seq_len or ModelConfig.from_json(model).max_position_embeddings
    tokenizer, lengths, errors = Tokenizer.from_dir(model), [], []
    for index, text in enumerate(texts):
        try:
            length = len(encode_prompt(text, tokenizer))
            check_length(f"request 'r{index + 1}'", length, max_new_tokens, longest)
        except ValueError as error:
            errors.append(str(error))
        else:
            lengths.append(length + max_new_tokens)
    if not lengths:
        refused = [completion_payload(p, Completion.refused("", e)) for p, e in zip(prompts, errors, strict=True)]
        raise AllRefusedError(errors, {"completions": refused})
    return lengths


def sized_for(settings: "EngineConfig", model: Path, lengths: Sequence[int], max_seq_len: int | None) -> "EngineConfig":
    """``settings`` with room for sequences of ``lengths`` tokens, and on the CPU, whose free memory nobody measures,
    with no more cache than those take that run at once.

    Pieces are compiled for a ``max_seq_len``: unless it was given it is one of few, so that they are found again.
    """
    from .cache_sizing import check_host_memory
    from .config import ModelConfig
    from .ops.shapes import BLOCK_TOKENS

    config, longest = ModelConfig.from_json(model), settings.max_seq_len
    if max_seq_len is None:
        while longest < max(lengths):
            longest *= 2
        longest = min(longest, config.max_position_embeddings)
    requests = min(len(lengths), settings.max_requests)
    settings = replace(settings, max_seq_len=longest, max_requests=requests)
    if settings.device != "cpu":
        return settings
    blocks = sorted(-(-length // BLOCK_TOKENS) for length in lengths)
    settings = replace(settings, num_blocks=sum(blocks[-requests:]))
    check_host_memory(config, settings, lower="max_new_tokens, or the length or number of prompts")
    return settings


def out_of_memory(error: BaseException) -> str | None:
    """One line about an error that means that memory ran out; ``None`` for any other."""
    import torch

    from .start_up import CaptureMemoryError

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, CaptureMemoryError):
        return f"{text}; or choose graphs 'off'"
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "a smaller max_seq_len, a smaller model or another device"
        return f"device memory must hold weights, caches and steps, got: {text.partition('. ')[0]}; try {remedy}"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"host memory must hold weights, caches and steps, got: {text}"
    return None


def show_prewarm(report: "PrewarmReport", libraries: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of what each library compiled and loaded, and the totals."""
    table = Table("library", *(Column(name, justify="right") for name in ("keys", "compiled", "loaded", "seconds")))
    for name, found in libraries.items():
        counts = [*(str(found[key]) for key in ("keys", "misses", "hits")), f"{found['seconds']:.1f}"]
        table.add_row(name, *(["", "", "", found["absent"]] if "absent" in found else counts))
    Console().print(table)
    print(
        f"{len(report.keys)} keys, {len(report.seconds)} run, {len(report.skipped)} warm before, "
        f"{report.wall_seconds:.1f} s, decision {report.decision}, ranks apart {report.rank_skew_seconds:.1f} s"
    )
