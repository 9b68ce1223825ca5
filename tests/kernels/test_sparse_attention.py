import sys
from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _attention_parts_kernel, _paged, _triton
from dsv4.ops.shapes import Shape, nano, tiny

from ..ops import contract
from ..ops.test_sparse_attention import Scene, scene
from . import interpreter
from .against_reference import compare, outputs

interpreter.repair()
SPEC = ops.spec("sparse_attention")
# a convex combination of values of size four, from scores with errors of about 1e-6
FP32 = {"rtol": 1e-5, "atol": 2e-5}
# Outputs and probabilities round by 2^-9 of themselves each; a probability next to a boundary may fall either way.
BF16 = {"rtol": 2**-7, "atol": 2**-8}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return FP32 if dtype == torch.float32 else BF16


def scene_arguments(s: Scene) -> tuple[tuple, dict]:
    """Positional and keyword arguments of a scene, with poisoned outputs."""
    values = [getattr(s, name) for name in s.__dataclass_fields__]
    out, lse = torch.full_like(s.q, torch.nan), torch.full(s.q.shape[:2], torch.nan)
    options = dict(zip(("window", "ratio", "entries", "scale", "deterministic"), values[-5:], strict=True))
    return (*values[:-5], out, lse), options


def packed(cache: torch.Tensor) -> torch.Tensor:
    """The same rows in the FP8 layout; NaN rows, which nobody may read, become NaN codes."""
    flat = (~cache[:, :, 0].isnan()).flatten().nonzero().squeeze(1)
    stored = torch.full((cache.shape[0], _paged.fp8_page_bytes(cache.shape[1], 512)), 255, dtype=torch.uint8)
    _paged.write(stored, flat, cache.flatten(0, 1)[flat])
    return stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape: Shape, num_tokens: int, dtype: torch.dtype):
    args, options = contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens)
    compare(SPEC, args, {**options, "deterministic": True}, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", ["none", "all", "picked"])
def test_short_pages_odd_windows_and_heads(entries: str, dtype: torch.dtype):
    """Three heads, a window of 20 (blocks mix both lists) over pages of 16, pads anywhere, unread rows poisoned."""
    s = scene(40, seed=1, dtype=dtype, entries=entries, deterministic=True)
    compare(SPEC, *scene_arguments(s), **tolerance(dtype))


@pytest.mark.parametrize("entries", ["all", "picked"])
def test_head_dimension_that_is_no_power_of_two(entries: str):
    s = scene(15, seed=2, dim=40, entries=entries, deterministic=True, scale=40**-0.5)
    compare(SPEC, *scene_arguments(s), **FP32)


def test_fp32_queries_over_a_bf16_cache_and_bf16_over_fp32():
    s = scene(15, seed=3, entries="all", deterministic=True)
    narrow = replace(s, window_cache=s.window_cache.bfloat16(), entry_cache=s.entry_cache.bfloat16())
    compare(SPEC, *scene_arguments(narrow), **FP32)
    compare(SPEC, *scene_arguments(replace(s, q=s.q.bfloat16())), **BF16)


@pytest.mark.parametrize("entries", ["none", "all", "picked"])
def test_fp8_caches(entries: str):
    s = scene(12, seed=4, dtype=torch.bfloat16, dim=512, entries=entries, scale=512**-0.5, deterministic=True)
    fp8 = replace(s, window_cache=packed(s.window_cache), entry_cache=packed(s.entry_cache))
    compare(SPEC, *scene_arguments(fp8), **BF16)


def test_bf16_probabilities_round_in_blocks_of_64():
    """Nearly every element equals the reference; the rest lie next to a rounding boundary."""
    s = scene(40, seed=5, dtype=torch.bfloat16, window=100, entries="all", scale=3 * 32**-0.5, deterministic=True)
    args, options = scene_arguments(s)
    got, want = (outputs(SPEC, f, args, options)[0] for f in (SPEC.cuda, SPEC.reference))
    assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_bitwise_the_same_alone(dtype: torch.dtype):
    s = scene(17, seed=6, dtype=dtype, window=70)
    args, options = scene_arguments(s)
    out, lse = outputs(SPEC, SPEC.cuda, args, options)
    wider = replace(s, picks=torch.nn.functional.pad(s.picks, (0, 200), value=-1))
    for t in range(17):
        args, options = scene_arguments(wider.rows([t]))
        alone, alone_lse = outputs(SPEC, SPEC.cuda, args, options)
        assert torch.equal(alone[0].view(torch.uint8), out[t].view(torch.uint8)) and torch.equal(alone_lse[0], lse[t])


def test_picks_that_are_not_visible_absent_pages_and_strong_sinks():
    s = scene(30, seed=7, num_picks=9, deterministic=True)
    visible = ((s.positions + 1) // 4).clamp_min(0).int()
    bad = torch.stack((visible, visible + 3, torch.full_like(visible, 2**31 - 1), torch.full_like(visible, -7)), dim=1)
    s = replace(s, picks=torch.cat((bad[:, :2], s.picks, bad[:, 2:]), dim=1))
    s = replace(s, sink=torch.tensor([200.0, -torch.inf, 3000.0]))
    s.window_tables[0, 3], s.block_tables[1, 0] = -1, -1
    compare(SPEC, *scene_arguments(s), **FP32)
    none = torch.full_like(s.window_tables, -1)
    s = replace(s, window_tables=none, block_tables=torch.full_like(s.block_tables, -1))
    out, lse = outputs(SPEC, SPEC.cuda, *scene_arguments(s))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_layer_without_entries_passes_empty_tensors():
    s = scene(9, seed=8, entries="none", num_picks=0, deterministic=True)
    empty = torch.empty(0, 1, 32, dtype=torch.bfloat16)
    s = replace(s, ratio=0, entry_cache=empty, block_tables=torch.empty(4, 0, dtype=torch.int32))
    compare(SPEC, *scene_arguments(replace(s, picks=torch.empty(0, 0, dtype=torch.int32))), **FP32)


def test_refusals():
    s = scene(3, seed=9)
    with pytest.raises(NotImplementedError, match="must have one dtype on this device, got torch.float32 and torch.bf"):
        outputs(SPEC, SPEC.cuda, *scene_arguments(replace(s, entry_cache=s.entry_cache.bfloat16())))
    args, options = scene_arguments(s)
    wide = torch.empty(3, 3, 2, 32)
    with pytest.raises(ValueError, match="out must be contiguous"):
        SPEC.cuda(*args[:9], wide[:, :, 0], args[10], **options)


def divided(s: Scene) -> tuple[list[str], tuple[torch.Tensor, torch.Tensor]]:
    """Kernels that serve the scene outside deterministic mode, and what they give."""
    args, options = scene_arguments(replace(s, deterministic=False))
    with _triton.recording() as launches:
        outputs(SPEC, SPEC.cuda, args, options)
    out, lse = outputs(SPEC, SPEC.cuda, args, options)
    return [launch.kernel.fn.__name__ for launch in launches], (out, lse)


PARTS = ["_attention_scores", "_attention_part", "_merge_parts"]


@pytest.mark.parametrize("programs", [1, 9, 512])
@pytest.mark.parametrize("window", [20, 128])
@pytest.mark.parametrize("entries", ["none", "all", "picked"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_few_rows_divide_their_keys(monkeypatch, fp8, entries, window, programs):
    """Any number of parts, blocks that mix both lists, pads, empty parts; workspaces hold NaN before."""
    monkeypatch.setattr(_attention_parts_kernel, "PROGRAMS", programs)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a, torch.nan, **k))
    s = scene(9, seed=programs, dtype=torch.bfloat16, dim=512, entries=entries, scale=512**-0.5, window=window)
    if fp8:
        s = replace(s, window_cache=packed(s.window_cache), entry_cache=packed(s.entry_cache))
    kernels, got = divided(s)
    assert kernels == PARTS
    want = outputs(SPEC, SPEC.reference, *scene_arguments(replace(s, deterministic=True)))
    torch.testing.assert_close(got[0], want[0], **BF16)
    torch.testing.assert_close(got[1], want[1], **FP32)
    # A probability rounded relative to another maximum would move the result by 2^-9; see the module.
    assert (got[0].float() - want[0].float()).norm() <= 2**-11 * want[0].float().norm()


def test_parts_without_keys_and_strong_sinks():
    """Unusable picks, absent pages, rows without any key, sinks that take everything or nothing."""
    s = scene(12, seed=11, num_picks=90, dtype=torch.bfloat16, dim=64, window=64)
    s = replace(s, sink=torch.tensor([200.0, -torch.inf, 3000.0]))
    s.picks[:, 10:] = torch.where(s.picks[:, 10:] % 2 == 0, -1, 2**31 - 1)
    s.window_tables[0, 3], s.block_tables[1, 0] = -1, -1
    kernels, got = divided(s)
    want = outputs(SPEC, SPEC.reference, *scene_arguments(replace(s, deterministic=True)))
    assert kernels == PARTS
    torch.testing.assert_close(got[0], want[0], **BF16)
    torch.testing.assert_close(got[1], want[1], **FP32)
    none = {name: torch.full_like(getattr(s, name), -1) for name in ("window_tables", "block_tables")}
    _, (out, lse) = divided(replace(s, **none))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_what_is_divided():
    """Few bf16 rows over bf16 pages of a power of two; the number of parts follows from sizes alone."""
    s = scene(5, seed=12, dtype=torch.bfloat16, dim=64)
    assert divided(s)[0] == PARTS and divided(s.rows([]))[0] == PARTS
    many = scene(_attention_parts_kernel.FEW_PROGRAMS + 1, seed=12, dtype=torch.bfloat16, dim=64)
    fp32 = scene(5, seed=12, dim=64)
    narrow = scene(5, seed=12, dtype=torch.bfloat16, dim=32)
    odd_pages = replace(s, window_cache=s.window_cache[:, :12].contiguous())
    for other in (many, fp32, narrow, odd_pages):
        assert divided(other)[0] == ["_sparse_attention"]
    counts = [_attention_parts_kernel.num_parts(rows, 64, 640) for rows in (0, 1, 2, 4, 8)]
    assert counts == [32, 32, 32, 16, 8]
    assert _attention_parts_kernel.num_parts(1, 64, 8192 + 128) == _attention_parts_kernel.MOST_PARTS
    assert _attention_parts_kernel.num_parts(1, 64, 1) == 1


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_cases_select_their_keys(shape: Shape):
    cases = SPEC.prewarm_cases(shape, torch.device("cuda"), 8)
    assert len({case.key for case in cases}) == len(cases) == (13 if shape.head_dim == 512 else 7)
    on_cpu = sys.modules["dsv4.ops.sparse_attention"].cuda_cases(shape, torch.device("cpu"), 8)
    for case, twin in zip(cases, on_cpu, strict=True):
        with _triton.recording() as launches:
            args, options = twin.arguments()
            SPEC.cuda(*args, **options)
        keys = [launch.key for launch in launches]
        assert case.key in keys and set(keys) <= {case.key for case in cases}
