"""FP4 experts resident, and re-encoded as FP8 through our kernel and through DeepGEMM: one reference for all three."""

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _backends
from dsv4.ops.shapes import Shape, flash, nano, tiny
from dsv4.reencode import fp4_to_fp8

from ..ops.moe_numpy import relative_rms
from . import expert_memory as memory

pytestmark = pytest.mark.gpu
SPEC = ops.spec("expert_ffn")
SHAPES = (tiny, nano, replace(flash, name="flash-4-experts", num_experts=4, experts_per_token=3))
# Our kernels sum products in fp32, as the reference does: what differs lies on a rounding boundary of bf16 or e4m3.
# FP8 tensor cores keep about 14 bits of a sum of 128 products, which moves more results across such boundaries: 2e-3 to
# 4e-3 on an H200. One block scale in a hundred wrong by a factor of two would be 0.1.
BOUND = {"fp4": 1e-3, "triton": 1e-3, "deep_gemm": 1e-2}


def reencoded(shape: Shape, fp4: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same experts as e4m3 with block scales; the halves of w13 have their own blocks."""
    w13, w13_scale, w2, w2_scale = fp4
    found = []
    for weight, scale, parts in ((w13, w13_scale, 2), (w2, w2_scale, 1)):
        experts = []
        for e in range(shape.num_experts):
            halves = zip(weight[e].chunk(parts), scale[e].chunk(parts), strict=True)
            coded = [fp4_to_fp8(f"expert {e}", *(t.contiguous() for t in half)) for half in halves]
            experts.append([torch.cat([t.view(torch.uint8) for t, _ in coded]), torch.cat([s for _, s in coded])])
        codes, scales = (torch.stack(each) for each in zip(*experts, strict=True))
        found += [codes.view(torch.float8_e4m3fn), scales]
    return tuple(found)


def run(way: str, rows: tuple, fp4: tuple, fp8: tuple, deterministic: bool = False) -> torch.Tensor:
    keywords = {"limit": 10.0, "deterministic": deterministic}
    if way == "fp4":
        return SPEC.cuda(*rows, *fp4, **keywords)
    with _backends.using("gemm", way):
        return SPEC.cuda(*rows, *fp8, **keywords)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_all_agree_with_the_reference(shape):
    torch.manual_seed(0)
    fp4 = memory.random_fp4(shape, memory.CUDA)
    fp8 = reencoded(shape, fp4)
    for num_tokens in (0, 1, 7, 33, 129):
        rows = memory.random_rows(shape, num_tokens, memory.CUDA)
        rows[2][num_tokens // 2 :: 5] = -1
        want = SPEC.reference(*rows, *fp4, limit=10.0, deterministic=False)
        assert torch.equal(want, SPEC.reference(*rows, *fp8, limit=10.0, deterministic=False))
        for way, bound in BOUND.items():
            got = run(way, rows, fp4, fp8)
            assert got.shape == want.shape and got.isfinite().all()
            assert not got[(rows[2] == -1).all(1)].any()
            if num_tokens > 1:
                assert want.any() and relative_rms(got.cpu(), want.cpu()) < bound, (way, num_tokens)


@pytest.mark.parametrize("way", BOUND)
def test_rows_do_not_depend_on_their_batch(way):
    """DeepGEMM picks other tiles for other row counts, ours are fixed by ``deterministic``."""
    torch.manual_seed(1)
    fp4 = memory.random_fp4(nano, memory.CUDA)
    fp8 = reencoded(nano, fp4)
    rows = memory.random_rows(nano, 1500, memory.CUDA)
    whole = run(way, rows, fp4, fp8, deterministic=True)
    for part in (slice(0, 1), slice(77, 78), slice(0, 9), slice(100, 300), slice(700, 1500)):
        assert torch.equal(run(way, tuple(t[part] for t in rows), fp4, fp8, deterministic=True), whole[part]), part


@pytest.mark.parametrize("way", BOUND)
def test_replay_follows_the_ids(way):
    """Nothing of a captured call depends on what the ids held then."""
    torch.manual_seed(2)
    fp4 = memory.random_fp4(nano, memory.CUDA)
    fp8 = reencoded(nano, fp4)
    rows = memory.random_rows(nano, 40, memory.CUDA)
    rows[2].fill_(-1)
    run(way, rows, fp4, fp8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(way, rows, fp4, fp8)
    for seed in (3, 4):
        torch.manual_seed(seed)
        for static, fresh in zip(rows, memory.random_rows(nano, 40, memory.CUDA), strict=True):
            static.copy_(fresh)
        rows[2][seed::7] = -1
        graph.replay()
        assert torch.equal(out, run(way, rows, fp4, fp8)) and out.any()
