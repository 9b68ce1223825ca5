import numpy as np
import pytest
import torch

from dsv4 import ops


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_streams"), [(0, 4), (1, 1), (7, 4), (65, 3)])
def test_copies_rows(num_tokens, num_streams, dtype, id_dtype):
    ids = np.random.default_rng(num_tokens).integers(0, 37, size=num_tokens)
    weight = torch.randn(37, 24)
    got = ops.embed_streams(torch.tensor(ids, dtype=id_dtype), weight, num_streams=num_streams, dtype=dtype)
    want = np.repeat(weight.to(dtype).float().numpy()[ids][:, None], num_streams, axis=1)
    assert got.dtype == dtype and got.is_contiguous()
    np.testing.assert_array_equal(got.float().numpy(), want)


def test_ids_outside_the_table_give_zeros():
    weight = torch.full((11, 8), float("nan"))  # a row that is read shows
    weight[4] = torch.randn(8)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([-1, 4, 11, 2**31 - 1, -(2**31)], dtype=dtype)
        got = ops.embed_streams(ids, weight, num_streams=2, dtype=torch.float32)
        want = torch.zeros(5, 2, 8)
        want[1] = weight[4]
        assert torch.equal(got, want)


def test_streams_do_not_share_memory():
    weight = torch.randn(5, 8)
    got = ops.embed_streams(torch.tensor([3]), weight, num_streams=2, dtype=torch.float32)
    got[0, 0] += 1
    assert torch.equal(got[0, 1], weight[3])


@pytest.mark.parametrize(
    ("ids", "weight", "streams", "dtype", "message"),
    [
        (torch.tensor([1.0]), torch.randn(5, 8), 4, torch.float32, "token_ids must be 1-D int32 or int64, got 1-D"),
        (torch.tensor([[1]]), torch.randn(5, 8), 4, torch.float32, "token_ids must be 1-D int32 or int64, got 2-D"),
        (torch.tensor([1]), torch.randn(8), 4, torch.float32, r"weight must be \[vocab >= 1, hidden\], got \[8\]"),
        (torch.tensor([1]), torch.randn(5, 8), 0, torch.float32, "num_streams must be at least 1, got 0"),
        (torch.tensor([1]), torch.randn(5, 8), 4, torch.float16, "dtype must be float32 or bfloat16, got"),
    ],
)  # fmt: skip
def test_errors(ids, weight, streams, dtype, message):
    with pytest.raises(ValueError, match="embed_streams " + message):
        ops.embed_streams(ids, weight, num_streams=streams, dtype=dtype)
