import pytest
import torch

from dsv4 import ops
from dsv4.ops import _cases, _paged
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare, outputs

interpreter.repair()
SPEC = ops.spec("qkv_rope_cache")


def arguments(shape, num_tokens, dtype, cache_dtype, quantize):
    (*args, cache), kwargs = contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens)
    pages, rows, dim = cache.shape
    poison = _cases.empty_cache(pages, rows, dim, dtype=cache_dtype, device=torch.device("cpu"))
    poison.fill_(255 if cache_dtype == torch.uint8 else float("nan"))
    return (*args, poison), kwargs | {"quantize": quantize}


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, dtype, num_tokens):
    # fp32 sums differ in order; where that moves a value over a rounding boundary, the bf16 neighbour is 2^-8 away,
    # and the rotation, which adds two such values, can make it two neighbours.
    rtol, atol = (2e-6, 2e-6) if dtype == torch.float32 else (2**-7, 1e-2)
    compare(SPEC, *arguments(shape, num_tokens, dtype, dtype, False), rtol=rtol, atol=atol)


@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_quantized(shape, cache_dtype, num_tokens):
    args, kwargs = arguments(shape, num_tokens, torch.bfloat16, cache_dtype, True)
    (want_q, want), (got_q, got) = (outputs(SPEC, f, args, kwargs) for f in (SPEC.reference, SPEC.cuda))
    torch.testing.assert_close(got_q, want_q, rtol=2**-7, atol=1e-2)
    # Quantising is bit-exact; before it a bf16 value may be the neighbour, whose FP8 code then is too: rarely.
    assert (contract.as_bytes(got) != contract.as_bytes(want)).float().mean() < 1e-3
    slots = torch.arange(got.shape[0] * _paged.page_rows(got, shape.head_dim))
    written = torch.isin(slots, args[5])
    a, b = (_paged.read(cache, slots, shape.head_dim).float() for cache in (got, want))
    assert a[~written].isnan().all() and b[~written].isnan().all()
    assert (a[written] != b[written]).float().mean() < 1e-3
    torch.testing.assert_close(a[written], b[written], rtol=1 / 8, atol=1e-2)


def test_every_rounding_of_the_queries():
    """Queries so small that eps decides: a rounding left out moves whole heads to the neighbouring bf16 scale."""
    (q, *args), kwargs = arguments(tiny, 65, torch.bfloat16, torch.bfloat16, False)
    g = torch.Generator().manual_seed(0)
    q = q * (3e-4 * torch.exp(2 * torch.rand(65, 2, 1, generator=g))).bfloat16()
    want, got = (outputs(SPEC, f, (q, *args), kwargs)[0] for f in (SPEC.reference, SPEC.cuda))
    assert (want != got).float().mean() < 2e-2  # a mean on a rounding boundary may fall to either side


def test_rows_are_independent():
    """Bitwise: one row alone equals the same row among 33."""
    args, kwargs = arguments(nano, 33, torch.bfloat16, torch.uint8, True)
    together, cache = outputs(SPEC, SPEC.cuda, args, kwargs)
    for t in (0, 5, 31):
        row = tuple(a[t : t + 1] if i in (0, 1, 4, 5) else a for i, a in enumerate(args))
        alone, alone_cache = outputs(SPEC, SPEC.cuda, row, kwargs)
        assert torch.equal(alone, together[t : t + 1])
        a, b = (_paged.read(c, args[5][t : t + 1], nano.head_dim) for c in (alone_cache, cache))
        assert torch.equal(a, b)


def test_buffers_must_be_contiguous():
    args, kwargs = arguments(tiny, 3, torch.bfloat16, torch.bfloat16, True)
    wide = args[-1].repeat(1, 1, 2)[..., : tiny.head_dim]
    with pytest.raises(ValueError, match="qkv_rope_cache buffers that are written must be contiguous"):
        SPEC.cuda(*args[:-1], wide, **kwargs)
