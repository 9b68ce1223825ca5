"""Inputs that broke other implementations, on a GPU: cases C3, C5, C6, C8 and C11.

The functions return raw samples, for the tests and for the GPU report alike: every number in ``samples`` counts what
went wrong and must be zero (``bar``), except that C11 holds messages. ``detail`` says what happened.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .graphs.rank_programs import run_ranks

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano"
C3_TOKENS = (1, 17, 4096)
C5_ROWS = (32, 33, 64, 128, 250, 256)
C6_LENGTHS = (5, 0, -1, -4)
# By dtype, relative RMS against the reference in the same precision: fp32 sums of up to 16,384 terms in another order
# (sqrt(16384) * 2^-24); a bf16 output may round the other way, by one step of 2^-8, in half of all elements.
RMS_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-9}
BF16_ELEMENT = (
    2.0**-7
)  # C3: one bf16 element against the fp32 reference rounded to bf16: at most one step, of 2^-8 to 2^-7

Call = tuple[tuple[Any, ...], dict[str, Any]]


# ---- C3: the forgotten sibling ---------------------------------------------------------------------------------------


def c3(device: str = "cuda") -> dict[str, Any]:
    """In a fresh process: the prewarm of Flash for one token, then mHC post at 1, 17 and 4,096 tokens."""
    with tempfile.TemporaryDirectory(prefix="dsv4-c3-") as directory:
        (found,) = run_ranks(_c3_process, 1, Path(directory), device)
    samples = {key: found[key] for key in ("compilations", "loads", "beyond_tolerance")}
    return {"samples": samples, "bar": 0, "detail": found}


def _c3_process(rank: int, size: int, directory: Path, device: str) -> dict[str, Any]:
    from dsv4 import ops, prewarming
    from dsv4.config import ModelConfig, flash_config
    from dsv4.engine_config import EngineConfig
    from dsv4.graphs.jit_monitor import JitMonitor
    from dsv4.ops._jit_libraries import jit_libraries
    from dsv4.ops.shapes import nano

    on_cpu = device == "cpu"
    config = ModelConfig.from_json(NANO) if on_cpu else flash_config()
    settings = EngineConfig(device=device, numerics="official", compile="off", token_budget=1, max_requests=1)
    report = prewarming.warm_kernels(config, settings)
    spec, shape = ops.spec("mhc_post"), nano if on_cpu else config.shape()
    compilations, loads, beyond, errors = 0, 0, 0, {}
    for num_tokens in C3_TOKENS:
        call = spec.example(
            shape, num_tokens=num_tokens, device=torch.device("cpu"), dtype=torch.bfloat16, seed=num_tokens
        )
        want = spec.reference(*call[0], **call[1]).float()
        args, kwargs = moved(call, device)
        with JitMonitor(libraries=jit_libraries()) as monitor:
            got = spec.overload(*args, **kwargs).cpu().float()
        seen = monitor.report()
        compilations, loads = compilations + seen.compilations, loads + seen.loads
        error = ((got - want).abs() / want.abs().clamp_min(1.0)).max().item()
        errors[num_tokens] = error
        beyond += not error <= BF16_ELEMENT
    return {
        "compilations": compilations, "loads": loads, "beyond_tolerance": beyond, "largest_error": errors,
        "prewarmed_keys": len(report.keys), "run": len(report.seconds),
    }  # fmt: skip


# ---- C5, C6: lengths that are zero, or negative ----------------------------------------------------------------------

CONTEXT_OPS = ("indexer_picks", "indexer_logits", "indexer_topk", "sparse_attention")  # these read what came before
LENGTH_OPS = (*CONTEXT_OPS, "qkv_rope_cache", "compressor_update")


def c5(device: str = "cuda") -> dict[str, Any]:
    """Requests of length zero (no visible entry), and steps of pads alone, at sizes where others read past the end."""
    samples = {rows: _zero_lengths(rows, device) | _pads_alone(rows, device) for rows in C5_ROWS}
    return {"samples": samples, "bar": 0, "detail": {"ops": LENGTH_OPS}}


def _zero_lengths(num_rows: int, device: str) -> dict[str, int]:
    """``num_rows`` requests of one row at position 0: the compressed context has no entry yet, lengths are 0 // 4."""
    rows = torch.arange(num_rows)
    values = {
        "positions": torch.zeros(num_rows, dtype=torch.int64),
        "row_requests": rows.int(),
        "query_starts": torch.arange(num_rows + 1, dtype=torch.int32),
        "seq_lens": torch.ones(num_rows, dtype=torch.int32),
        "block_tables": torch.zeros(num_rows, 8, dtype=torch.int32),
        "window_tables": torch.zeros(num_rows, 16, dtype=torch.int32),
        "window_slots": torch.full((num_rows,), -1),
        "state_slots": (rows % 2).int(),
    }
    found = {}
    for name in CONTEXT_OPS:
        got, want = both(name, num_rows, values, device)
        found[f"{name}_differs"] = sum(not close(g, w) for g, w in zip(got, want, strict=True))
    return found


def _pads_alone(num_rows: int, device: str) -> dict[str, int]:
    """Nothing but pads: lengths 0 in int32, no request, no page; outputs are zero (−inf, −1) and caches untouched."""
    values = {
        "positions": torch.full((num_rows,), -1),
        "row_requests": torch.full((num_rows,), -1, dtype=torch.int32),
        "query_starts": torch.zeros(num_rows + 1, dtype=torch.int32),
        "seq_lens": torch.zeros(num_rows, dtype=torch.int32),
        "block_tables": torch.full((num_rows, 8), -1, dtype=torch.int32),
        "window_tables": torch.full((num_rows, 16), -1, dtype=torch.int32),
        "window_slots": torch.full((num_rows,), -1),
        "state_slots": torch.full((num_rows,), -1, dtype=torch.int32),
    }
    found = {}
    for name in LENGTH_OPS:
        got, want = both(name, num_rows, values, device)
        found[f"{name}_pads_differ"] = sum(not same(g, w) for g, w in zip(got, want, strict=True))
    return found


def c6(device: str = "cuda") -> dict[str, Any]:
    """Lengths 5, 0, −1, −4; a batch of three padded to four; 512 picks."""
    ends = torch.tensor(C6_LENGTHS)
    values = {
        "positions": ends - 1,
        "row_requests": torch.tensor([0, -1, -1, -1], dtype=torch.int32),
        "query_starts": torch.tensor([0, 1, 1, 1, 1], dtype=torch.int32),
        "seq_lens": ends.int(),
        "block_tables": torch.tensor([[0], *[[-1]] * 3], dtype=torch.int32).repeat(1, 16),
        "window_tables": torch.tensor([[0], *[[-1]] * 3], dtype=torch.int32).repeat(1, 32),
        "window_slots": torch.tensor([4, -1, -1, -1]),
        "state_slots": torch.tensor([0, -1, -1, -1], dtype=torch.int32),
    }
    samples, detail = {"pads_not_zero": 0, "valid_changed": 0, "not_finite": 0}, {}
    for name in LENGTH_OPS:
        got, want = both(name, 4, values, device)
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            rows = g.shape[0] == 4 and name != "compressor_update"  # a row each; anything else is a cache
            pads, valid = ((g[1:], w[1:]), (g[:1], w[:1])) if rows else ((g[:0], w[:0]), (g, w))
            bad = {"pads_not_zero": int(not same(*pads)), "valid_changed": int(not close(*valid))}
            if rows and g.is_floating_point():
                bad["not_finite"] = int((valid[0].isfinite() != valid[1].isfinite()).any())
            detail[f"{name}.{index}"] = bad
            samples = {key: count + bad.get(key, 0) for key, count in samples.items()}
    return {"samples": samples, "bar": 0, "detail": detail}


# ---- C8: no tokens ---------------------------------------------------------------------------------------------------


def c8(device: str = "cuda") -> dict[str, Any]:
    """Every op without a row: outputs of the right shapes and dtypes, and no launch error."""
    from dsv4 import ops
    from dsv4.ops.shapes import flash

    shape = replace(flash, name="flash-8-experts", num_experts=8, expert_hidden=128, vocab=1024)
    samples, detail = {}, {}
    for name, spec in ops.specs().items():
        if spec.cuda is None:
            continue
        call = spec.example(shape, num_tokens=0, device=torch.device("cpu"), dtype=torch.bfloat16, seed=0)
        want = outputs(spec, spec.reference, call)
        try:
            got = outputs(spec, spec.overload, moved(call, device))
            if device != "cpu":
                torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            samples[name], detail[name] = 1, f"{type(error).__name__}: {error}"
            continue
        kinds = [[(tuple(t.shape), t.dtype) for t in found] for found in (got, want)]
        samples[name], detail[name] = int(kinds[0] != kinds[1]), str(kinds[0])
    return {"samples": samples, "bar": 0, "detail": detail}


# ---- C11: a warm-up that does nothing --------------------------------------------------------------------------------


def c11(device: str = "cuda") -> dict[str, Any]:
    """Models that the prewarm does not recognise, as a whole or in one layer, and one that no op has a case for."""
    import dsv4
    from dsv4 import prewarming
    from dsv4.config import flash_config
    from dsv4.engine_config import EngineConfig

    def nothing(*_: object) -> list:
        return []

    def no_case() -> None:
        found, prewarming.prewarm_cases = prewarming.prewarm_cases, nothing
        try:
            prewarming.warm_kernels(flash_config(), EngineConfig(device=device, compile="off"))
        finally:
            prewarming.prewarm_cases = found

    def other_layer() -> None:
        model = _nano(device)
        model.blocks[1].ffn = nn.Sequential(model.blocks[1].ffn)
        dsv4.prewarm(model)

    tries = {
        "no_case": no_case,
        "other_model": lambda: dsv4.prewarm(nn.Linear(8, 8, device=device)),
        "other_layer": other_layer,
    }
    samples = {}
    for name, attempt in tries.items():
        try:
            attempt()
            message = "nothing was raised"
        except (ValueError, TypeError) as error:
            message = str(error)
        samples[name] = {"message": message}
    return {"samples": samples, "bar": 0, "detail": {}}


def _nano(device: str) -> Any:
    from dsv4.checkpoint import Checkpoint
    from dsv4.config import ModelConfig
    from dsv4.execution import Execution
    from dsv4.model import DeepseekV4
    from dsv4.weights import load_weights

    config, execution = ModelConfig.from_json(NANO), Execution.of("official")
    weights = load_weights(Checkpoint.open(NANO), config, "official", torch.bfloat16, device, progress=False)
    return DeepseekV4(config, execution, weights, max_positions=512)


# ---- the second trigger ----------------------------------------------------------------------------------------------


def first_use() -> dict[str, Any]:
    """In a fresh process: a model built by hand warms itself at its first op, once, and never while it is captured."""
    with tempfile.TemporaryDirectory(prefix="dsv4-first-use-") as directory:
        (found,) = run_ranks(_first_use_process, 1, Path(directory))
    return {"samples": {name: found[name] for name in _FIRST_USE}, "bar": 0, "detail": found}


_FIRST_USE = ("not_armed", "warm_before", "cold_after_first_op", "warmed_again", "compilations_later",
              "not_refused_in_capture", "cold_op_captured")  # fmt: skip


def _first_use_process(rank: int, size: int, directory: Path) -> dict[str, Any]:
    import dsv4
    from dsv4 import ops, prewarming
    from dsv4.graphs.jit_monitor import JitMonitor
    from dsv4.ops import _runtime
    from dsv4.ops._jit_libraries import jit_libraries

    model = _nano("cuda")
    x, weight = torch.randn(3, 256, device="cuda").bfloat16(), torch.randn(256, device="cuda")
    message, cold = _in_capture(lambda: dsv4.prewarm(model)), _in_capture(lambda: ops.rms_norm(x, weight, eps=1e-6))
    armed, before = len(_runtime.first_uses), len(_runtime.warm_keys())
    ops.rms_norm(x, weight, eps=1e-6)
    after, armed_after = _runtime.warm_keys(), len(_runtime.first_uses)
    shape, device = model.config.shape(), torch.device("cuda")
    needed = {case.key for case in prewarming.prewarm_cases(model.config, device, prewarming.PREWARM_TOKENS)}
    with JitMonitor(libraries=jit_libraries()) as monitor:
        for spec in (ops.spec("mhc_pre"), ops.spec("mhc_post"), ops.spec("route_topk")):
            args, kwargs = spec.example(shape, num_tokens=9, device=device, dtype=torch.bfloat16, seed=1)
            spec.overload(*args, **kwargs)
    return {
        "not_armed": int(armed != 1), "warm_before": before, "cold_after_first_op": len(needed - after),
        "warmed_again": armed_after, "compilations_later": monitor.report().compilations + monitor.report().loads,
        "not_refused_in_capture": int("outside stream capture" not in message),
        "cold_op_captured": int("must be warm before stream capture" not in cold), "keys": len(after),
        "message": message, "cold": cold,
    }  # fmt: skip


def _in_capture(call: Callable[[], object]) -> str:
    """What ``call`` raises while a stream is being captured."""
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


# ---- comparisons -----------------------------------------------------------------------------------------------------


def moved(call: Call, device: str) -> Call:
    """The call with its tensors on ``device``."""
    args, kwargs = call
    return tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args), kwargs


def outputs(spec: Any, function: Any, call: Call) -> list[torch.Tensor]:
    """Returned tensors, then the arguments that the call writes, on the CPU."""
    args, kwargs = call
    writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
    args = tuple(a.clone() if w else a for a, w in zip(args, writes, strict=False))
    returned = function(*args, **kwargs)
    returned = [returned] if isinstance(returned, torch.Tensor) else list(returned or ())
    return [t.cpu() for t in (*returned, *(a for a, w in zip(args, writes, strict=False) if w))]


def both(
    name: str, num_rows: int, values: Mapping[str, torch.Tensor], device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of the kernel and of the reference on one random call with the row metadata ``values``.

    Outputs that are written in place start as NaN, and cache pages that no table names hold NaN: a read of one shows.
    """
    from dsv4 import ops
    from dsv4.ops.shapes import flash

    spec = ops.spec(name)
    shape = replace(flash, name="flash-8-experts", num_experts=8, vocab=1024)
    args, kwargs = spec.example(shape, num_tokens=num_rows, device=torch.device("cpu"), dtype=torch.bfloat16, seed=7)
    names = [argument.name for argument in spec.overload._schema.arguments]
    given = dict(zip(names, args, strict=False))
    for argument in ("window_cache", "entry_cache", "cache"):
        if argument in given:
            given[argument] = given[argument].clone()
            given[argument][1:] = torch.nan  # page 0 is the only one in use
    if name == "indexer_topk":
        entries = values["block_tables"].shape[1] * 64
        given["scores"] = torch.randn(num_rows, entries, generator=torch.Generator().manual_seed(3)).bfloat16()
    given |= {argument: value for argument, value in values.items() if argument in given}
    if "picks" in given:
        given["picks"] = _picks(values["positions"], kwargs["ratio"], shape.index_topk)
    call = (tuple(given.values()), kwargs)
    return outputs(spec, spec.overload, moved(call, device)), outputs(spec, spec.reference, call)


def _picks(positions: torch.Tensor, ratio: int, topk: int) -> torch.Tensor:
    """Every visible entry, then −1."""
    entry = torch.arange(topk).expand(len(positions), topk)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp_min(0).unsqueeze(1)
    return torch.where(entry < visible, entry, -1).int()


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    flat = [t.contiguous().flatten().view(torch.uint8) for t in (got, want) if t.numel()]
    return not flat or torch.equal(*flat)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Floats within the dtype's relative RMS, special values in the same places; everything else equal."""
    if got.dtype not in RMS_TOLERANCES or got.shape != want.shape or got.dtype != want.dtype:
        return same(got, want)
    a, b = got.double(), want.double()
    regular = b.isfinite()
    if not torch.equal(a[~regular].nan_to_num(7.0), b[~regular].nan_to_num(7.0)) or not a[regular].isfinite().all():
        return False
    a, b = a[regular], b[regular]
    if not b.numel():
        return True
    error, size = (a - b).square().mean().sqrt(), b.square().mean().sqrt()
    return bool(error <= RMS_TOLERANCES[got.dtype] * size)
