import sys

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _paged, _triton, indexer_logits_kernel
from dsv4.ops.shapes import Shape, nano, tiny

from ..ops import contract
from ..ops.test_indexer_logits import PAGE, RATIO, scene
from . import interpreter
from .against_reference import outputs

interpreter.repair()
SPEC = ops.spec("indexer_logits")
FP32, BF16 = torch.float32, torch.bfloat16


def options(dtype: torch.dtype, *, deterministic: bool = True) -> dict:
    return {"ratio": RATIO, "dtype": dtype, "deterministic": deterministic}


def check(args: list | tuple, dtype: torch.dtype, *, deterministic: bool = True) -> torch.Tensor:
    """Equal −inf; fp32 sums differ in order only; bf16 scores are equal unless a dot product is next to a boundary."""
    keywords = options(dtype, deterministic=deterministic)
    (want,), (got,) = (outputs(SPEC, f, tuple(args), keywords) for f in (SPEC.reference, SPEC.cuda))
    assert got.dtype == want.dtype and got.shape == want.shape
    seen = want > -torch.inf
    assert torch.equal(got > -torch.inf, seen) and not got.isnan().any()
    # a dot product of 128 values is of size 11; with weights of size one a few of them make the score
    a, b = got[seen].float(), want[seen].float()
    if dtype == FP32:
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-4)
    elif a.numel():
        assert (a == b).float().mean() > 0.99
        largest = args[0].float().norm(dim=-1).max() * args[1].abs().max() * 14  # norm of a key is about 11
        assert (a - b).abs().max() <= 2**-8 * largest
    return got


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape: Shape, num_tokens: int, dtype: torch.dtype, deterministic: bool):
    args, _ = contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens)
    got = check(args, dtype, deterministic=deterministic)
    assert num_tokens == 0 or (got > -torch.inf).any()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [20, 90])
def test_mixed_rows_absent_blocks_and_poison(num_tokens: int, dtype: torch.dtype):
    """Requests alternate row by row, so no program of several rows (from 65 on) can share its keys."""
    check(scene(num_tokens, seed=1, dtype=dtype), dtype)


def test_rows_that_share_keys():
    """Runs of one request longer and shorter than a program, with pads inside and at the end."""
    args = scene(101, seed=2, dtype=BF16)
    order = args[4].sort(stable=True).indices.roll(7)
    for i in (0, 1, 3, 4):
        args[i] = args[i][order]
    for dtype in (FP32, BF16):
        got = check(args, dtype)
        for t in (0, 9, 40, 100):  # alone a row does not share: the same bits
            alone = [a[t : t + 1] if i in (0, 1, 3, 4) else a for i, a in enumerate(args)]
            assert torch.equal(SPEC.cuda(*alone, **options(dtype))[0], got[t])


def tile(args: list | tuple, *, deterministic: bool) -> int:
    with _triton.recording() as launches:
        SPEC.cuda(*args, **options(BF16, deterministic=deterministic))
    return launches[0].meta["entry_block"]


def test_deterministic_mode_has_one_tile_and_wider_tables_only_append():
    args = scene(70, seed=3, dtype=BF16)
    whole = SPEC.cuda(*args, **options(BF16))
    args[5] = torch.nn.functional.pad(args[5], (0, 30), value=-1)
    wide = SPEC.cuda(*args, **options(BF16))
    assert torch.equal(wide[:, : whole.shape[1]], whole) and (wide[:, whole.shape[1] :] == -torch.inf).all()
    few = [a[:2] if i in (0, 1, 3, 4) else a for i, a in enumerate(args)]
    large, small = indexer_logits_kernel.ENTRY_BLOCK, indexer_logits_kernel.SMALL_BLOCK
    assert tile(args, deterministic=True) == tile(few, deterministic=True) == large
    assert tile(args, deterministic=False) == large and tile(few, deterministic=False) == small
    assert tile([few[0].float(), *few[1:]], deterministic=False) == large // 4


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_small_tiles(num_tokens: int):
    """Absent blocks, pads and poison; the same bits every time."""
    args = scene(num_tokens, seed=10, dtype=BF16)
    assert tile(args, deterministic=False) == indexer_logits_kernel.SMALL_BLOCK
    for dtype in (FP32, BF16):
        assert torch.equal(check(args, dtype, deterministic=False), check(args, dtype, deterministic=False))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("query", [BF16, torch.float8_e4m3fn], ids=str)
def test_fp8_cache(query: torch.dtype, dtype: torch.dtype):
    args = scene(20, seed=4, dim=128, dtype=BF16)
    flat = (~args[2][:, :, 0].isnan()).flatten().nonzero().squeeze(1)
    cache = torch.full((40, _paged.fp8_page_bytes(PAGE, 128)), 255, dtype=torch.uint8)
    _paged.write(cache, flat, args[2].flatten(0, 1)[flat])
    args[0], args[2] = args[0].to(query), cache
    check(args, dtype)


def test_other_dtypes_and_head_dimensions():
    args = scene(12, seed=5)
    check([args[0].bfloat16(), *args[1:]], FP32)
    check([*args[:2], args[2].bfloat16(), *args[3:]], FP32)
    check(scene(12, seed=6, dim=40, heads=17), FP32)


def test_nothing_cached():
    args = scene(6, seed=8)
    args[2], args[5] = torch.empty(0, PAGE, 32), torch.full((4, 9), -1, dtype=torch.int32)
    assert (check(args, FP32) == -torch.inf).all()
    args[5] = torch.empty(4, 0, dtype=torch.int32)
    assert SPEC.cuda(*args, **options(FP32)).shape == (6, 0)


def test_refuses_a_strided_cache():
    args = scene(3)
    args[2] = args[2].repeat(1, 1, 2)[:, :, ::2]
    with pytest.raises(ValueError, match="cache must be contiguous"):
        SPEC.cuda(*args, **options(FP32))


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_cases_select_their_keys(shape: Shape):
    cases = SPEC.prewarm_cases(shape, torch.device("cuda"), 8)
    assert len({case.key for case in cases}) == len(cases) == (8 if shape.index_dim == 128 else 4)
    on_cpu = sys.modules["dsv4.ops.indexer_logits"].cuda_cases(shape, torch.device("cpu"), 8)
    for case, twin in zip(cases, on_cpu, strict=True):
        with _triton.recording() as launches:
            args, keywords = twin.arguments()
            SPEC.cuda(*args, **keywords)
        assert [launch.key for launch in launches] == [case.key]
