"""The mHC kernels of TileLang on a GPU: against the references, against each other, and inside a graph."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _backends, _mhc, _runtime, _tilelang
from dsv4.ops.shapes import Shape, flash, nano

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS = {"mhc_post": 4, "mhc_post_pre": 4, "mhc_pre": 1, "mhc_head": 1}  # arguments with one row per token
SIZES = (0, 1, 33, 129, 4225)
CASES = [(nano, torch.bfloat16), (nano, torch.float32), (flash, torch.bfloat16)]


@pytest.fixture(autouse=True, scope="module")
def _tilelang_kernels():
    """Each takes seconds to compile, so threads do it before the first test."""
    with _backends.using("mhc", "tilelang"), ThreadPoolExecutor(8) as threads:
        calls = [(n, *arguments(n, shape, 1, dtype)) for shape, dtype in reversed(CASES) for n in ROWS]
        for call_done in [threads.submit(call, *each) for each in calls]:
            call_done.result()
        yield


def arguments(name: str, shape: Shape, num_tokens: int, dtype: torch.dtype, *, deterministic: bool = False):
    """As ``example`` makes them, but random numbers come from the GPU: 4,225 rows take seconds on a CPU."""
    args, kwargs = ops.spec(name).example(shape, num_tokens=2, device=CUDA, dtype=dtype, seed=num_tokens)
    rows = [torch.randn(num_tokens, *a.shape[1:], device=CUDA, dtype=a.dtype) for a in args[: ROWS[name]]]
    rows[2:] = [row.abs() for row in rows[2:]]
    return (*rows, *args[len(rows) :]), kwargs | ({"deterministic": deterministic} if kwargs else {})


def call(name: str, args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...]:
    result = ops.spec(name).overload(*args, **kwargs)
    return result if isinstance(result, tuple) else (result,)


def same(left: tuple, right: tuple) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def exact_weights(streams, fn, scale, base, *, hc_eps, eps, sinkhorn_iters, **_) -> tuple[torch.Tensor, torch.Tensor]:
    """``post`` and ``comb`` in float64."""
    flat, num_streams = streams.double().flatten(1), streams.shape[1]
    mixes = (flat @ fn.double().t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    post, comb = mixes[:, num_streams : 2 * num_streams], mixes[:, 2 * num_streams :]
    bases = base.double()[num_streams : 2 * num_streams], base.double()[2 * num_streams :]
    comb = (comb * scale[2] + bases[1]).unflatten(-1, (num_streams, num_streams))
    return 2 * _mhc.sigmoid(post * scale[1] + bases[0]), _mhc.sinkhorn(comb, sinkhorn_iters, hc_eps)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_post_has_the_bits_of_the_reference(shape, dtype, num_tokens):
    args, kwargs = arguments("mhc_post", shape, num_tokens, dtype)
    assert torch.equal(*call("mhc_post", args, kwargs), ops.spec("mhc_post").reference(*args))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_pre(shape, dtype, num_tokens, deterministic):
    """Weights within 6e-6 of float64: the fp32 sums of 16,384 products, and a factor of at most 2 behind them.

    A bf16 x is rounded twice, so it may be two steps off where a sum lies on a tie, and equal almost everywhere.
    """
    args, kwargs = arguments("mhc_pre", shape, num_tokens, dtype, deterministic=deterministic)
    x, post, comb = call("mhc_pre", args, kwargs)
    assert same((x, post, comb), call("mhc_pre", args, kwargs))
    for got, want in zip((post, comb), exact_weights(*args[:4], **kwargs), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=6e-6)
    want = ops.spec("mhc_pre").reference(*args, **kwargs)[0]
    torch.testing.assert_close(x, want, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    if dtype == torch.bfloat16:
        assert (x != want).sum() <= 1 + 0.002 * x.numel()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_post_pre_is_post_then_pre(shape, dtype, num_tokens, deterministic):
    args, kwargs = arguments("mhc_post_pre", shape, num_tokens, dtype, deterministic=deterministic)
    together = call("mhc_post_pre", args, kwargs)
    (streams,) = call("mhc_post", args[:4], {})
    assert same(together, (streams, *call("mhc_pre", (streams, *args[4:]), kwargs)))


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post_pre", "mhc_head"])
def test_a_row_does_not_see_the_batch(name):
    args, kwargs = arguments(name, flash, 129, torch.bfloat16, deterministic=True)
    whole = call(name, args, kwargs)
    for rows in (slice(0, 1), slice(3, 7), slice(63, 66), slice(128, 129)):
        alone = call(name, (*(a[rows].clone() for a in args[: ROWS[name]]), *args[ROWS[name] :]), kwargs)
        assert same(alone, tuple(w[rows] for w in whole))


def test_arguments_may_lie_anywhere_and_the_workspace_may_hold_anything(monkeypatch):
    args, kwargs = arguments("mhc_post_pre", flash, 9, torch.bfloat16)
    want = call("mhc_post_pre", args, kwargs)
    original = _mhc.alloc_partials
    monkeypatch.setattr(_mhc, "alloc_partials", lambda *a, **k: original(*a, **k).fill_(float("nan")))
    odd = []
    for a in args:
        wide = a.new_full((a.numel() + 1,), float("nan"))
        wide[1:] = a.flatten()
        odd.append(wide[1:].view(a.shape))
    strided = [torch.stack((a, torch.full_like(a, float("nan"))), -1)[..., 0] for a in args]
    for changed in (odd, strided):
        assert same(call("mhc_post_pre", tuple(changed), kwargs), want)


@pytest.mark.parametrize("num_tokens", [1, 33, 4225])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_replay_follows_its_inputs(name, num_tokens):
    args, kwargs = arguments(name, flash, num_tokens, torch.bfloat16)
    call(name, args, kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(name, args, kwargs)
    for _ in range(2):
        args[0].add_(0.25)
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        assert same(captured, call(name, args, kwargs))


def test_a_cold_key_during_capture_is_refused():
    y, streams = torch.randn(2, 192, device=CUDA), torch.randn(2, 4, 192, device=CUDA)
    weights = torch.rand(2, 4, device=CUDA), torch.rand(2, 4, 4, device=CUDA)
    before = len(_tilelang._kernels)
    with pytest.raises(_runtime.ColdKernelError, match="mhc_post"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.mhc_post(y, streams, *weights)
    assert len(_tilelang._kernels) == before


def test_more_elements_than_fit_in_32_bits():
    """140,000 rows of Flash are 2.3e9 elements; the last rows alone give the same bits."""
    args, kwargs = arguments("mhc_post_pre", flash, 140_000, torch.bfloat16, deterministic=True)
    whole = call("mhc_post_pre", args, kwargs)
    alone = call("mhc_post_pre", (*(a[-70:].clone() for a in args[:4]), *args[4:]), kwargs)
    assert same(tuple(w[-70:] for w in whole), alone)
    assert same(call("mhc_post", args[:4], {}), whole[:1])
