"""Linear layer on FP8 activations and FP8 weights.

Shapes: x e4m3 ``[num_tokens, in]`` with x_scale fp32 ``[num_tokens, ceil(in / 128)]`` (from ``quant_fp8``); weight
e4m3 ``[out, in]`` with weight_scale fp32 ``[ceil(out / 128), ceil(in / 128)]``; result ``[num_tokens, out]`` in
``dtype`` (fp32 or bf16). Sizes need not be multiples of 128.
Numerics: codes times scales are exact in fp32 for power-of-two scales; products accumulate in fp32 and round once to
``dtype``. With ``deterministic`` a row's result does not depend on the other rows.
Kernels: with the ``gemm`` backend ``deep_gemm``, DeepGEMM serves bf16 results whose weight suits it (``in`` a multiple
of 128, ``out`` of 8): FP8 products, which the tensor cores add in about 14 bits within a block of 128. Its tiles vary
with the number of rows, but every tile adds a block's products in one instruction sequence and the blocks in order, so
a row's result does not depend on them. Everything else, and everything by default, is served by our kernel, which
multiplies decoded codes; it alone serves ``fp8_linear_decoded``.
Errors: ``ValueError`` on wrong ranks, sizes or dtypes.
Source: ``fp8_gemm`` of the official inference code.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from . import _backends, _deep_gemm, _formats
from ._registry import Arguments, PrewarmCase, register
from ._rows import check_rows, product
from ._runtime import Key
from .quant_fp8 import quant_fp8
from .shapes import Shape

_BLOCK = _formats.WEIGHT_BLOCK


def _alloc(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    for subject, tensor, want in (
        ("x", x, torch.float8_e4m3fn),
        ("x_scale", x_scale, torch.float32),
        ("weight", weight, torch.float8_e4m3fn),
        ("weight_scale", weight_scale, torch.float32),
    ):
        if tensor.dim() != 2 or tensor.dtype != want:
            raise ValueError(f"fp8_linear {subject} must be 2-D {want}, got {tensor.dim()}-D {tensor.dtype}")
    rows, cols = weight.shape
    blocks = [-(-rows // _BLOCK), -(-cols // _BLOCK)]
    if x.shape[1] != cols:
        raise ValueError(f"fp8_linear x must be [num_tokens, {cols}], got {list(x.shape)}")
    if x_scale.shape[1] != blocks[1]:
        raise ValueError(f"fp8_linear x_scale must be [num_tokens, {blocks[1]}], got {list(x_scale.shape)}")
    if list(weight_scale.shape) != blocks:
        raise ValueError(f"fp8_linear weight_scale must be {blocks}, got {list(weight_scale.shape)}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"fp8_linear dtype must be float32 or bfloat16, got {dtype}")
    check_rows("fp8_linear", "x", x.shape[0], x_scale=x_scale)
    return torch.empty(x.shape[0], rows, dtype=dtype, device=x.device)


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    """``dequantised x @ dequantised weight.T``, accumulated in fp32 and rounded once."""
    out = _alloc(x, x_scale, weight, weight_scale, dtype)
    values = _formats.dequantize_fp8(x, x_scale)
    weights = _formats.dequantize_fp8_weight(weight, weight_scale)
    return out.copy_(product(values, weights, deterministic=deterministic))


def fake(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(x, x_scale, weight, weight_scale, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    x, x_scale = quant_fp8(torch.randn(num_tokens, shape.hidden, generator=g))
    weight = torch.randn(shape.q_lora_rank, shape.hidden, generator=g).to(torch.float8_e4m3fn)
    blocks = (-(-shape.q_lora_rank // _BLOCK), -(-shape.hidden // _BLOCK))
    weight_scale = torch.exp2(torch.randint(-8, -3, blocks, generator=g).float())
    args = tuple(t.to(device) for t in (x, x_scale, weight, weight_scale))
    return args, {"dtype": dtype, "deterministic": True}


def _by_deep_gemm(weight_shape: Sequence[int], dtype: torch.dtype) -> bool:
    """The dispatch rule between the two libraries; see the module's docstring."""
    chosen = _backends.backend("gemm") == "deep_gemm"
    return chosen and dtype == torch.bfloat16 and _deep_gemm.fits(*weight_shape)


def cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    """Rows never depend on each other; with ``deterministic`` every number of rows also sums in one order."""
    if not _by_deep_gemm(weight.shape, dtype):
        return cuda_decoded(x, x_scale, weight, weight_scale, dtype=dtype, deterministic=deterministic)
    out = _alloc(x, x_scale, weight, weight_scale, dtype)
    _deep_gemm.gemm_nt(x, x_scale, weight, weight_scale, out)
    return out


def cuda_decoded(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    """:func:`cuda` by our kernel, whatever the backend."""
    from . import fp8_linear_kernel

    out = _alloc(x, x_scale, weight, weight_scale, dtype)
    fp8_linear_kernel.run(x, x_scale, weight, weight_scale, out, deterministic=deterministic)
    return out


def matrices(shape: Shape) -> tuple[tuple[int, int], ...]:
    """``(out, in)`` of every FP8 matrix of a model of ``shape`` that this op multiplies with."""
    hidden, latent = shape.hidden, shape.q_lora_rank
    return (
        (latent, hidden),
        (shape.head_dim, hidden),
        (shape.num_heads * shape.head_dim, latent),
        (hidden, shape.o_groups * shape.o_lora_rank),
        (hidden, hidden),  # of the MTP block, one of which multiplies every stream
    )


def most_rows(shape: Shape, size: tuple[int, int], max_tokens: int) -> int:
    """Rows that a step of ``max_tokens`` multiplies with a matrix of ``size``."""
    return max_tokens * (shape.num_streams if size == (shape.hidden, shape.hidden) else 1)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """What bf16 results can need, of either library, for up to ``max_tokens`` rows."""
    cases: dict[Key, PrewarmCase] = {}
    if _backends.backend("gemm") == "deep_gemm":
        for key, call in deep_gemm_calls(shape, max_tokens).items():
            cases[key] = _case("fp8_linear", key, *call, False, device)
    for size in matrices(shape):
        if not _by_deep_gemm(size, torch.bfloat16):
            cases |= decoded_cases("fp8_linear", size, most_rows(shape, size, max_tokens), device)
    return tuple(cases.values())


def decoded_cases(op: str, size: tuple[int, int], most: int, device: torch.device) -> dict[Key, PrewarmCase]:
    """What our kernel can need for bf16 results of ``op``, of up to ``most`` rows and a matrix of ``size``."""
    return {key: _case(op, key, *call, device) for key, *call in _triton_keys(*size, most)}


def deep_gemm_calls(shape: Shape, max_tokens: int) -> dict[Key, tuple[int, int, int]]:
    """By key of a DeepGEMM kernel that a step of ``max_tokens`` tokens can need: rows, ``out`` and ``in`` of a call."""
    found: dict[Key, tuple[int, int, int]] = {}
    for size in filter(lambda size: _deep_gemm.fits(*size), matrices(shape)):
        most = most_rows(shape, size, max_tokens)
        for key, rows in _deep_gemm.keys.keys_for(*size, most, _deep_gemm.num_sms()).items():
            found.setdefault(key, (rows, *size))
    return found


def _triton_keys(outs: int, width: int, max_rows: int) -> Iterator[tuple[Key, int, int, int, bool]]:
    """Key, rows, weight rows, width and ``deterministic`` per tile; weights have as few rows as divide alike."""
    from . import _few_rows_kernel, _matmul_tiles, fp8_linear_kernel

    unit, most = _matmul_tiles.width_unit(outs, 16), _few_rows_kernel.MOST_OUTS
    outs = unit if outs < most else most + 16 - unit
    for count, deterministic in itertools.product(_matmul_tiles.sample_counts(max_rows), (False, True)):
        x, weight = (torch.empty(n, width, dtype=torch.float8_e4m3fn, device="meta") for n in (count, outs))
        key = fp8_linear_kernel.key(x, weight, torch.bfloat16, deterministic=deterministic)
        yield key, count, outs, width, deterministic


def _case(
    op: str, key: Key, count: int, rows: int, width: int, deterministic: bool, device: torch.device
) -> PrewarmCase:
    def arguments() -> Arguments:
        blocks = -(-width // _BLOCK)
        x, weight = (torch.zeros(n, width, device=device).to(torch.float8_e4m3fn) for n in (count, rows))
        x_scale, weight_scale = (torch.ones(n, blocks, device=device) for n in (count, -(-rows // _BLOCK)))
        return (x, x_scale, weight, weight_scale), {"dtype": torch.bfloat16, "deterministic": deterministic}

    return PrewarmCase(op=op, key=key, arguments=arguments)


fp8_linear = register(
    "fp8_linear",
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
