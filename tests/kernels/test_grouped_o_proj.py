import pytest
import torch

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter, prewarm
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("grouped_o_proj")
FP32, BF16 = torch.float32, torch.bfloat16
# fp32: the order of at most 1,024 sums; bf16: one rounding of the result
TOLERANCE = {FP32: {"rtol": 2e-5, "atol": 2e-5}, BF16: {"rtol": 2**-7, "atol": 2e-5}}


def make(num_tokens, heads, head_dim, rope_dim, groups, rank, dtype, weight_dtype):
    g = torch.Generator().manual_seed(num_tokens + head_dim)
    o = torch.randn(num_tokens, heads, head_dim, generator=g).to(dtype)
    angles = torch.rand(50, rope_dim // 2, generator=g) * 6.28
    positions = torch.randint(0, 50, (num_tokens,), generator=g)
    positions[1::5] = -1
    o[positions < 0] = float("nan")  # pads are not read
    positions[:1] = 60  # past the table: its last row, as in the reference
    width = heads // groups * head_dim
    weight = (torch.randn(groups, rank, width, generator=g) * width**-0.5).to(weight_dtype)
    return o, torch.cat((angles.cos(), angles.sin()), -1), positions, weight


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), **TOLERANCE[dtype])


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (7, 6, 40, 16, 3, 10),
        (20, 3, 40, 40, 1, 70),
        (150, 2, 40, 16, 2, 24),
        (300, 2, 192, 64, 2, 24),
        (5, 2, 100, 80, 1, 16),
        (4, 2, 6, 2, 2, 3),
        (1, 6, 40, 16, 3, 10),
        (1, 3, 700, 62, 1, 20),
        (1, 2, 7, 2, 2, 3),
        (9, 20, 24, 8, 2, 17),
        (16, 5, 300, 20, 1, 33),
    ],
    ids=str,
)
def test_odd_sizes_and_pads(sizes, dtype, weight_dtype):
    compare(SPEC, make(*sizes, dtype, weight_dtype), {"deterministic": False}, **TOLERANCE[dtype])


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_rotation_rounds_to_bf16_before_the_product(num_tokens, deterministic, weight_dtype):
    o, table, positions, _ = make(num_tokens, 1, 64, 64, 1, 64, BF16, FP32)
    o = o.nan_to_num()
    weight = torch.eye(64, dtype=weight_dtype)[None]  # shows the operand itself
    compare(SPEC, (o, table, positions, weight), {"deterministic": deterministic}, rtol=0, atol=0)


def test_a_single_pad_gives_zeros_and_is_not_read():
    o, table, positions, weight = make(1, 2, 64, 32, 1, 16, BF16, BF16)
    positions[0] = -1
    o[:] = float("nan")
    for deterministic in (False, True):
        assert not SPEC.cuda(o, table, positions, weight, deterministic=deterministic).any()


@pytest.mark.parametrize("num_tokens, deterministic, kernel", [
    (0, False, "few_rows_o_proj"), (1, False, "one_row_o_proj"), (2, False, "few_rows_o_proj"),
    (16, False, "few_rows_o_proj"), (17, False, "grouped_o_proj"), (1, True, "grouped_o_proj"),
])  # fmt: skip
def test_which_kernel_serves(num_tokens, deterministic, kernel):
    with _triton.recording() as calls:
        SPEC.cuda(*make(num_tokens, 2, 64, 32, 1, 16, BF16, BF16), deterministic=deterministic)
    assert [call.key[0] for call in calls] == [kernel]


def test_row_alone_equals_row_in_batch():
    args = make(260, 2, 192, 64, 1, 40, BF16, BF16)

    def run(rows):
        return SPEC.cuda(args[0][rows], args[1], args[2][rows], args[3], deterministic=True)

    full = run(slice(0, 260))  # every tile size is used
    for rows in (slice(0, 1), slice(259, 260), slice(16, 32), slice(100, 140), slice(0, 256)):
        assert torch.equal(run(rows), full[rows])


def test_wrong_number_of_positions():
    o, table, positions, weight = make(4, 2, 64, 32, 1, 16, BF16, BF16)
    with pytest.raises(ValueError, match="grouped_o_proj positions must have the 4 rows of o, got 1"):
        SPEC.cuda(o, table, positions[:1], weight, deterministic=True)


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_covers_every_step(shape):
    prewarm.check_every_step(SPEC, shape)
