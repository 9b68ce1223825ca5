"""Routed experts: the weighted sum of each row's top-k SwiGLU experts.

Shapes: x ``[T, D]`` e4m3 with x_scale ``[T, ceil(D/128)]`` fp32 for FP4 and FP8 weights, fp32 or bf16 with an empty
x_scale for dense ones; ids ``[T, K]`` int32 (−1 = none; ids outside 0…E−1 are ignored); weights ``[T, K]`` fp32;
w13 ``[E, 2I, D]`` (gate rows over up rows) and w2 ``[E, D, I]``, one dtype:
uint8 FP4 ``[.., cols/2]`` with E8M0 bytes ``[E, rows, cols/32]``; float8_e4m3fn with fp32 w13_scale
``[E, 2*ceil(I/128), ceil(D/128)]`` (the halves have their own blocks) and w2_scale ``[E, ceil(D/128), ceil(I/128)]``;
float32 or bfloat16 with empty scales. Result ``[T, D]`` fp32; rows without an expert are zero and never read.
Numerics: fp32 products. fp32 x: no other rounding. e4m3 and bf16 x: both products and the activation are rounded to
bf16; e4m3 x also quantises the activation to FP8 (1 x 128) before w2. The routing weight multiplies the activation in
fp32 before w2. A row's experts are summed in fp32 in top-k order.
Errors: ``ValueError`` for dtypes or shapes that do not agree.
Source: MoE and Expert of the official inference code.
"""

import torch

from . import _backends, _experts, _rows
from ._formats import ACTIVATION_BLOCK, FP4_BLOCK, WEIGHT_BLOCK, encode_e8m0, pack_fp4, quantize_fp4
from ._registry import Arguments, PrewarmCase, register
from ._runtime import Key
from .quant_fp8 import reference as quant_fp8
from .shapes import Shape


def _alloc(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> torch.Tensor:
    if w13.dim() != 3:
        raise ValueError(f"expert_ffn w13 must have 3 dimensions, got {w13.dim()}")
    hidden, _ = _experts.check_weights("expert_ffn", w13, w13_scale, w2, w2_scale)
    _experts.check_activations("expert_ffn", x, x_scale, w13, hidden)
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"expert_ffn ids and weights must be int32 and float32, got {ids.dtype} and {weights.dtype}")
    if ids.dim() != 2 or weights.dim() != 2 or ids.shape[1] != weights.shape[1]:
        raise ValueError(f"expert_ffn weights must have ids' shape {list(ids.shape)}, got {list(weights.shape)}")
    _rows.check_rows("expert_ffn", "x", x.shape[0], ids=ids, weights=weights)
    return torch.empty(x.shape[0], hidden, dtype=torch.float32, device=x.device)


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    deterministic: bool,
) -> torch.Tensor:
    """Group the (row, expert) pairs by expert, apply each expert once, then sum every row in top-k order."""
    out = _alloc(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale)
    act = torch.float32 if x.dtype == torch.float32 else torch.bfloat16
    rows_in = _experts.values(x, x_scale)
    parts = out.new_zeros(*ids.shape, out.shape[1])
    scaled = _experts.is_quantized(w13)
    for expert in ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        rows, ranks = (ids == expert).nonzero(as_tuple=True)
        scales = (w13_scale[expert], w2_scale[expert]) if scaled else (w13_scale, w2_scale)
        parts[rows, ranks] = _experts.apply_expert(
            rows_in[rows],
            weights[rows, ranks],
            *_experts.weight_values(w13[expert], scales[0], w2[expert], scales[1]),
            limit=limit,
            act=act,
            quantize=scaled,
            deterministic=deterministic,
        )
    out.zero_()
    for rank in range(ids.shape[1]):
        out += parts[:, rank]
    return out


def fake(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    """fp32: dense experts. bf16: what a bf16 model passes, FP4 experts and e4m3 activations. A last row is a pad."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    x, w13, w2 = (
        torch.randn(size, generator=g)
        for size in (
            (num_tokens, shape.hidden),
            (shape.num_experts, 2 * shape.expert_hidden, shape.hidden),
            (shape.num_experts, shape.hidden, shape.expert_hidden),
        )
    )
    topk = min(shape.experts_per_token, shape.num_experts)
    ids = torch.rand(num_tokens, shape.num_experts, generator=g).topk(topk).indices.int()
    weights = torch.rand(ids.shape, generator=g)
    if num_tokens > 1:
        ids[-1] = -1
    if dtype == torch.float32:
        empty = torch.empty(0)
        tensors = (x, empty, ids, weights, w13 * shape.hidden**-0.5, empty, w2 * shape.expert_hidden**-0.5, empty)
    else:
        tensors = (*quant_fp8(x), ids, weights, *_fp4(w13), *_fp4(w2))
    return tuple(t.to(device, copy=True) for t in tensors), {"limit": shape.swiglu_limit, "deterministic": True}


def _fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantize_fp4(weight * weight.shape[-1] ** -0.5)
    return pack_fp4(codes), encode_e8m0(scale)


def cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    deterministic: bool,
) -> torch.Tensor:
    """Grouped products over blocks of (row, expert) pairs; ``deterministic`` only fixes the size of the blocks."""
    from . import expert_ffn_kernel

    out = _alloc(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale)
    if _by_deep_gemm(w13.dtype, out.shape[1], w13.shape[1] // 2):
        from . import expert_ffn_deep_gemm_kernel

        expert_ffn_deep_gemm_kernel.run(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, out, limit)
    else:
        expert_ffn_kernel.run(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, out, limit, deterministic)
    return out


def _by_deep_gemm(weight: torch.dtype, hidden: int, inner: int) -> bool:
    """Whether DeepGEMM serves such experts; FP8 sizes that it does not take stay with our kernel."""
    if weight != _experts.FP8 or _backends.backend("gemm") != "deep_gemm":
        return False
    from . import expert_ffn_deep_gemm_kernel

    return expert_ffn_deep_gemm_kernel.fits(hidden, inner)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """FP4, FP8 and bf16 experts with bf16 models' activations, in blocks of every size.

    The number of experts is a run-time argument: calls have as few as make the average expert have few enough pairs.
    Not so for DeepGEMM, which is warmed for models whose experts are FP8 only: its calls need room for all experts.
    """
    from . import _expert_blocks_kernel, expert_ffn_kernel

    cases: dict[Key, PrewarmCase] = {}
    topk, sizes = shape.experts_per_token, (shape.hidden, shape.expert_hidden)
    for dtype in (_experts.FP4, _experts.FP8, torch.bfloat16):
        if _by_deep_gemm(dtype, *sizes):
            if shape.expert_dtype == "fp8":
                cases |= _deep_gemm_cases(shape, device, max_tokens)
            continue
        for num_tokens, experts, deterministic in _calls(dtype, topk):

            def arguments(
                dtype: torch.dtype = dtype,
                num_tokens: int = num_tokens,
                experts: int = experts,
                deterministic: bool = deterministic,
            ) -> Arguments:
                keywords = {"limit": shape.swiglu_limit, "deterministic": deterministic}
                return _blank(shape, dtype, num_tokens, experts, device), keywords

            x = torch.empty(0, dtype=_experts.FP8 if dtype != torch.bfloat16 else dtype, device="meta")
            weight = torch.empty(0, dtype=dtype, device="meta")
            pairs = expert_ffn_kernel.block_m(num_tokens, topk, experts, dtype, deterministic, device)
            keys = list(expert_ffn_kernel.keys(x, weight, *sizes, topk, pairs).values())
            if pairs:
                keys += _expert_blocks_kernel.keys(pairs)
            for key in keys:
                cases.setdefault(key, PrewarmCase(op="expert_ffn", key=key, arguments=arguments))
    return tuple(cases.values())


def _calls(dtype: torch.dtype, topk: int) -> list[tuple[int, int, bool]]:
    """Numbers of rows and of experts, and ``deterministic``, that reach every size of blocks: average experts of at
    most 16, at most 64 and more pairs, and for FP4 also of so few that every pair is alone."""
    calls = [(1, 1, False), (1, 1, True), (64 // topk + 1, 1, False)]
    if dtype == _experts.FP4:
        from .expert_ffn_few_kernel import MOST_ROWS

        rows = max(MOST_ROWS, 16 // topk) + 1
        calls += [(rows, -(-rows * topk // most), False) for most in (16, 64)]
    return calls


def _deep_gemm_cases(shape: Shape, device: torch.device, max_tokens: int) -> dict[Key, PrewarmCase]:
    """FP8 experts through DeepGEMM: its keys by the fewest rows that need them, and our kernels around it."""
    from . import _deep_gemm, _expert_blocks_kernel, expert_ffn_deep_gemm_kernel as kernel

    hidden, inner, topk = shape.hidden, shape.expert_hidden, shape.experts_per_token
    rows = kernel.product_keys(hidden, inner, topk, shape.num_experts, max_tokens, _deep_gemm.num_sms())
    ours = (*_expert_blocks_kernel.keys(kernel.RUN_ROWS), *kernel.keys(hidden, inner, topk).values())
    cases = {}
    for key, num_tokens in (rows | dict.fromkeys(ours, 1)).items():

        def arguments(num_tokens: int = num_tokens) -> Arguments:
            return kernel.arguments(shape, num_tokens, device)

        cases[key] = PrewarmCase(op="expert_ffn", key=key, arguments=arguments)
    return cases


def _blank(
    shape: Shape, dtype: torch.dtype, num_tokens: int, experts: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Rows of the first expert, and ``experts`` with weights of ``dtype``, all zero."""
    hidden, inner, topk = shape.hidden, shape.expert_hidden, shape.experts_per_token
    ids = torch.zeros(num_tokens, topk, dtype=torch.int32, device=device)
    scaled = dtype in (_experts.FP4, _experts.FP8)
    x = torch.zeros(num_tokens, hidden, dtype=_experts.FP8 if scaled else dtype, device=device)
    x_scale = torch.ones(num_tokens, -(-hidden // ACTIVATION_BLOCK) if scaled else 0, device=device)
    weights = []
    for lead, rows, cols in ((2, inner, hidden), (1, hidden, inner)):
        if dtype == _experts.FP4:
            sizes = (lead * rows, cols // 2), (lead * rows, cols // FP4_BLOCK)
        else:
            sizes = (lead * rows, cols), (lead * -(-rows // WEIGHT_BLOCK), -(-cols // WEIGHT_BLOCK))
        weights.append(torch.zeros(experts, *sizes[0], dtype=dtype, device=device))
        scale = torch.zeros(experts, *sizes[1], dtype=dtype if dtype == _experts.FP4 else torch.float32, device=device)
        weights.append(scale if scaled else torch.empty(0, device=device))
    return (x, x_scale, ids, torch.ones(ids.shape, device=device), *weights)


expert_ffn = register(
    "expert_ffn",
    "(Tensor x, Tensor x_scale, Tensor ids, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2, "
    "Tensor w2_scale, *, float limit, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
