"""First half of the attention output projection: inverse RoPE, then one low-rank product per group of heads.

Shapes: o ``[num_tokens, num_heads, head_dim]`` fp32 or bf16; rope_table ``[max_positions, rope_dim]`` fp32 (cosines,
then sines); positions ``[num_tokens]`` int64, −1 for a pad; weight ``[groups, rank, num_heads / groups * head_dim]``
fp32 or bf16; result ``[num_tokens, groups * rank]`` in o's dtype. Group g owns heads ``g * H/G … (g + 1) * H/G − 1``.
Numerics: the last rope_dim dims of every head are rotated by minus the row's own position in fp32 and rounded to o's
dtype, as in the official code; products accumulate in fp32 and round once. The input is not quantised. With
``deterministic`` a row's result does not depend on the other rows. Pad rows give zeros.
Errors: ``ValueError`` on wrong ranks, sizes or dtypes.
Source: ``Attention.forward`` (``apply_rotary_emb(inverse=True)`` and ``wo_a``) of the official inference code.
"""

import itertools

import torch

from . import _rope
from ._registry import Arguments, PrewarmCase, register
from ._rows import check_rows, product
from .shapes import Shape

_DTYPES = (torch.float32, torch.bfloat16)


def _alloc(o: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if o.dim() != 3 or o.dtype not in _DTYPES:
        raise ValueError(
            f"grouped_o_proj o must be a float32 or bfloat16 [tokens, heads, head_dim], got {o.dim()}-D {o.dtype}"
        )
    if weight.dim() != 3 or weight.dtype not in _DTYPES:
        raise ValueError(
            f"grouped_o_proj weight must be a float32 or bfloat16 [groups, rank, in], got {weight.dim()}-D "
            f"{weight.dtype}"
        )
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(f"grouped_o_proj positions must be 1-D int64, got {positions.dim()}-D {positions.dtype}")
    num_heads, head_dim = o.shape[1:]
    if rope_table.dim() != 2 or rope_table.dtype != torch.float32:
        raise ValueError(f"grouped_o_proj rope_table must be 2-D float32, got {rope_table.dim()}-D {rope_table.dtype}")
    if rope_table.shape[1] % 2 or not 0 < rope_table.shape[1] <= head_dim:
        raise ValueError(f"grouped_o_proj rope_dim must be even and in [2, {head_dim}], got {rope_table.shape[1]}")
    groups, rank, width = weight.shape
    if num_heads % groups:
        raise ValueError(f"grouped_o_proj groups must divide {num_heads} heads, got {groups}")
    if width != num_heads // groups * head_dim:
        raise ValueError(f"grouped_o_proj weight must take {num_heads // groups * head_dim} inputs, got {width}")
    check_rows("grouped_o_proj", "o", o.shape[0], positions=positions)
    return torch.empty(o.shape[0], groups * rank, dtype=o.dtype, device=o.device)


def reference(
    o: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, *, deterministic: bool
) -> torch.Tensor:
    """Un-rotate every head and project each group of heads to ``rank`` values."""
    out = _alloc(o, rope_table, positions, weight)
    turned = _rope.rotate(o, _rope.table_rows(rope_table, positions), inverse=True)
    _, rank, width = weight.shape
    for group, (target, matrix) in enumerate(zip(out.split(rank, dim=1), weight)):
        heads = turned.flatten(1)[:, group * width : (group + 1) * width]
        target.copy_(product(heads, matrix, deterministic=deterministic))
    return out.masked_fill_((positions < 0).unsqueeze(-1), 0.0)


def fake(
    o: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, *, deterministic: bool
) -> torch.Tensor:
    return _alloc(o, rope_table, positions, weight)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    o = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=g)
    angles = torch.rand(shape.max_context, shape.rope_dim // 2, generator=g) * 6.28
    positions = torch.randint(-1, shape.max_context, (num_tokens,), generator=g)
    width = shape.num_heads // shape.o_groups * shape.head_dim
    weight = torch.randn(shape.o_groups, shape.o_lora_rank, width, generator=g) * width**-0.5
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    args = (o.to(device, dtype), table.to(device), positions.to(device), weight.to(device, dtype))
    return args, {"deterministic": True}


def cuda(
    o: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, *, deterministic: bool
) -> torch.Tensor:
    """Rows never depend on each other; with ``deterministic`` every number of rows also sums in one order."""
    from . import grouped_o_proj_kernel

    out = _alloc(o, rope_table, positions, weight)
    grouped_o_proj_kernel.run(o, rope_table, positions, weight, out, deterministic=deterministic)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation per kernel and token tile, for bf16."""
    from . import _matmul_tiles, grouped_o_proj_kernel

    heads = shape.num_heads // shape.o_groups

    def tensors(count: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """One group suffices: what is compiled depends on the heads of a group, not on the number of groups."""
        o = torch.ones(count, heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        positions = torch.zeros(count, dtype=torch.int64, device=device)
        weight = torch.ones(1, shape.o_lora_rank, heads * shape.head_dim, dtype=torch.bfloat16, device=device)
        return o, torch.ones(1, shape.rope_dim, device=device), positions, weight

    cases = {}
    for count, deterministic in itertools.product(_matmul_tiles.sample_counts(max_tokens), (False, True)):

        def arguments(count: int = count, deterministic: bool = deterministic) -> Arguments:
            return tensors(count, device), {"deterministic": deterministic}

        o, table, _, weight = tensors(count, "meta")
        key = grouped_o_proj_kernel.key(o, table, weight, deterministic=deterministic)
        cases.setdefault(key, PrewarmCase(op="grouped_o_proj", key=key, arguments=arguments))
    return tuple(cases.values())


grouped_o_proj = register(
    "grouped_o_proj",
    "(Tensor o, Tensor rope_table, Tensor positions, Tensor weight, *, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
