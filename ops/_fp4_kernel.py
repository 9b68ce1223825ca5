"""Decoding of FP4 weights in registers (inlined device code): four bits to bf16, scale included, without rounding."""

import triton
import triton.language as tl

# Two words of 16 bits to four pairs of bf16, one pair per nibble: sign to bit 15, exponent and mantissa to bits 8 … 6,
# which is the value times 2^-126, also for 0.5, which is subnormal in both formats. Both factors are exact. The integer
# unit is the bottleneck: two operations a weight, and two multiplications of pairs in the other unit.
_NIBBLES = tl.constexpr(
    """
    {
    .reg .b32 a, b, f;
    mov.b32 f, 0x7E807E80;
    shl.b32 a, $4, 12;
    shl.b32 b, $4, 6;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    mul.rn.bf16x2 a, a, f;
    mul.rn.bf16x2 $0, a, $5;
    shl.b32 a, $4, 8;
    shl.b32 b, $4, 2;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    mul.rn.bf16x2 a, a, f;
    mul.rn.bf16x2 $1, a, $5;
    shl.b32 a, $4, 4;
    shr.b32 b, $4, 2;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    mul.rn.bf16x2 a, a, f;
    mul.rn.bf16x2 $2, a, $5;
    shr.b32 b, $4, 6;
    and.b32 a, $4, 0x80008000;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    mul.rn.bf16x2 a, a, f;
    mul.rn.bf16x2 $3, a, $5;
    }
    """
)

# Four bytes to four fp16, the low nibbles or the high ones: the upper byte of each first, sign to bit 7, exponent and
# mantissa to bits 3 … 1, all four at once; then two of them to a register. That is the value times 2^-14.
_LOW_NIBBLES = tl.constexpr(
    """
    {
    .reg .b32 a, b;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 1;
    and.b32 b, b, 0x0E0E0E0E;
    lop3.b32 a, a, 0x80808080, b, 0xEA;
    prmt.b32 $0, a, 0, 0x1404;
    prmt.b32 $1, a, 0, 0x3424;
    }
    """
)
_HIGH_NIBBLES = tl.constexpr(
    """
    {
    .reg .b32 a, b;
    shr.b32 b, $2, 3;
    and.b32 b, b, 0x0E0E0E0E;
    lop3.b32 a, $2, 0x80808080, b, 0xEA;
    prmt.b32 $0, a, 0, 0x1404;
    prmt.b32 $1, a, 0, 0x3424;
    }
    """
)


@triton.jit
def e8m0(code):
    """bf16 ``2^(code - 127)``, also the subnormal 2^-127; 255 gives infinity, see :func:`spoil`."""
    return tl.maximum(code.to(tl.int32) << 7, 0x40).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def spoil(acc, largest):
    """``acc [rows, pairs]`` with NaN in rows whose ``largest [rows, n]`` scale codes reach 255. Decoding happens where
    a code meets its weights, once per eight of them; this happens once."""
    return tl.where((tl.max(largest, axis=1) == 255)[:, None], float("nan"), acc)


@triton.jit
def e2m1(words, scale):
    """Four bf16 tiles, by nibble, of FP4 ``words [rows, n]`` int16 times bf16 ``scale [rows, n / 8]``, exact."""
    rows: tl.constexpr = words.shape[0]
    n: tl.constexpr = words.shape[1]
    spread = tl.reshape(tl.broadcast_to(scale[:, :, None], [rows, n // 8, 8]), [rows, n])
    kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
    return tl.inline_asm_elementwise(_NIBBLES, "=r,=r,=r,=r,r,r", [words, spread], dtype=kinds, is_pure=True, pack=2)


@triton.jit
def e2m1_fp16(codes):
    """Two fp16 tiles, of the low nibbles and the high ones, of FP4 ``codes`` (bytes): the value times 2^-14, exact.
    Two pieces of assembly, because Triton moves only one of a single result to where it is used."""
    low = tl.inline_asm_elementwise(_LOW_NIBBLES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    high = tl.inline_asm_elementwise(_HIGH_NIBBLES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return low, high
