"""Queries of the sparse-attention indexer: RoPE, optional Hadamard rotation and FP4 rounding, output format.

Shapes: q ``[T, Hi, di]`` fp32 or bf16 (output of the indexer's query projection); weights ``[T, Hi]`` fp32 or bf16
(head weights before scaling); rope_table ``[max_positions, rope_dim]`` fp32; positions ``[T]`` int64, −1 for a pad.
Returns q ``[T, Hi, di]`` in ``dtype`` and weights ``[T, Hi]`` fp32; both are zero for pads.
Numerics: the rotation is fp32 and rounds to q's dtype. ``quantize="fp4"`` then applies the Hadamard transform and
FP4 rounding in blocks of 32, each in q's dtype; ``"none"`` changes nothing. The head weight is ``weights * scale`` in
fp32, rounded to the dtype of ``weights``, as the official code does it. With ``dtype=float8_e4m3fn`` every head vector
is stored as e4m3 codes with one power-of-two scale, which is multiplied into its head weight: ReLU commutes with
positive factors, so ``relu(q . k) * weight`` keeps its value.
Errors: ``ValueError`` for other dtypes, shapes or values of ``quantize``.
Source: indexer of the official inference code.
"""

import torch

from . import _formats, _rope, _rows
from ._example_rows import example_rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape

_ACTIVATIONS = (torch.float32, torch.bfloat16)
_OUTPUTS = (*_ACTIVATIONS, torch.float8_e4m3fn)
_QUANTIZE = ("none", "fp4")


def _alloc(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    quantize: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dtype not in _ACTIVATIONS or weights.dtype not in _ACTIVATIONS:
        raise ValueError(f"indexer_query inputs must be float32 or bfloat16, got {q.dtype} and {weights.dtype}")
    if dtype not in _OUTPUTS:
        raise ValueError(f"indexer_query dtype must be one of {list(_OUTPUTS)}, got {dtype}")
    if quantize not in _QUANTIZE:
        raise ValueError(f"indexer_query quantize must be one of {list(_QUANTIZE)}, got {quantize!r}")
    if weights.shape[1:] != q.shape[1:2]:
        raise ValueError(f"indexer_query weights must have {q.shape[1]} heads, got {list(weights.shape[1:])}")
    _rows.check_indices("indexer_query", 1, positions=positions)
    _rows.check_rows("indexer_query", "q", q.shape[0], weights=weights, positions=positions)
    rope_dim, dim = rope_table.shape[1], q.shape[2]
    if rope_dim % 2 or rope_dim > dim:
        raise ValueError(f"indexer_query rope_dim must be even and at most {dim}, got {rope_dim}")
    if quantize == "fp4" and (dim & (dim - 1) or dim % _formats.FP4_BLOCK):
        raise ValueError(f"indexer_query FP4 head dimension must be a power of two from 32, got {dim}")
    return q.new_empty(q.shape, dtype=dtype), weights.new_empty(weights.shape, dtype=torch.float32)


def reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    quantize: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise the indexer's queries and scale its head weights."""
    out_q, out_weights = _alloc(q, weights, rope_table, positions, quantize, dtype)
    valid = (positions >= 0).unsqueeze(-1)
    value = _rope.rotate(q, _rope.table_rows(rope_table, positions))
    if quantize == "fp4":
        value = _formats.simulate_fp4(_formats.hadamard(value))
    value = torch.where(valid.unsqueeze(-1), value, 0.0)
    gain = torch.where(valid, (weights.float() * scale).to(weights.dtype), 0.0).float()
    if dtype == torch.float8_e4m3fn:
        value, factor = _formats.quantize_fp8(value, block=q.shape[2])
        gain = gain * factor.squeeze(-1)
    return out_q.copy_(value), out_weights.copy_(gain)


def fake(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    quantize: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(q, weights, rope_table, positions, quantize, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)
    q = torch.randn(num_tokens, shape.index_heads, shape.index_dim, generator=g).to(device, dtype)
    weights = torch.randn(num_tokens, shape.index_heads, generator=g).to(device, dtype)
    angles = 6.28 * torch.rand(rows.max_context, shape.rope_dim // 2, generator=g)
    rope_table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    scale = (shape.index_dim * shape.index_heads) ** -0.5
    quantize = "fp4" if dtype == torch.bfloat16 else "none"
    return (q, weights, rope_table, rows.positions), {"scale": scale, "quantize": quantize, "dtype": dtype}


def cuda(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    quantize: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import indexer_query_kernel

    out_q, out_weights = _alloc(q, weights, rope_table, positions, quantize, dtype)
    indexer_query_kernel.run(q, weights, rope_table, positions, out_q, out_weights, scale, quantize)
    return out_q, out_weights


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """bf16 queries: both numerics in bf16, and quantised ones as FP8 codes."""
    from . import indexer_query_kernel

    cases = []
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for quantize, dtype in (("fp4", bf16), ("none", bf16), ("fp4", fp8)):

        def arguments(quantize: str = quantize, dtype: torch.dtype = dtype) -> Arguments:
            args, kwargs = example(shape, num_tokens=1, device=device, dtype=bf16, seed=0)
            return args, kwargs | {"quantize": quantize, "dtype": dtype}

        key = indexer_query_kernel.key(shape.index_dim, shape.rope_dim, quantize, bf16, bf16, dtype)
        cases.append(PrewarmCase(op="indexer_query", key=key, arguments=arguments))
    return tuple(cases)


indexer_query = register(
    "indexer_query",
    "(Tensor q, Tensor weights, Tensor rope_table, Tensor positions, *, float scale, str quantize, ScalarType dtype)"
    " -> (Tensor q, Tensor weights)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
