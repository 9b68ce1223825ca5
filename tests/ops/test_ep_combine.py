import pytest
import torch

from dsv4 import ops


def make(capacity: int, count: int, num_tokens: int, seed: int):
    """y and the bookkeeping of ``count`` received rows at random distinct places of ``num_tokens``."""
    g = torch.Generator().manual_seed(seed)
    source = torch.full((capacity,), 1 << 40)  # what lies behind the count is never read
    source[:count] = torch.randperm(num_tokens, generator=g)[:count].sort().values
    y = torch.randn(capacity, 24, generator=g)
    y[count:] = float("nan")
    return y, source, torch.tensor([count], dtype=torch.int32), torch.full((num_tokens, 24), float("nan"))


@pytest.mark.parametrize(("capacity", "count", "num_tokens"), [(9, 5, 7), (4, 4, 4), (3, 0, 5), (3, 0, 0), (2, 1, 1)])
def test_rows_return_to_their_source(capacity, count, num_tokens):
    y, source, recv_count, out = make(capacity, count, num_tokens, seed=count)
    ops.ep_combine(y, source, recv_count, out, group="")
    received = dict(zip(source[:count].tolist(), range(count), strict=True))
    for t in range(num_tokens):
        assert torch.equal(out[t], y[received[t]] if t in received else torch.zeros(24))


def test_bookkeeping_outside_the_buffers():
    y, source, count, out = make(4, 3, 6, seed=1)
    with pytest.raises(ValueError, match=r"ep_combine recv_count must be in \[0, 4\], got 5"):
        ops.ep_combine(y, source, count + 2, out, group="")
    with pytest.raises(ValueError, match=r"ep_combine recv_source must be in \[0, 2\), got \d"):
        ops.ep_combine(y, source, count, out[:2], group="")


def test_wrong_arguments():
    y, source, count, out = make(4, 3, 6, seed=2)
    with pytest.raises(ValueError, match="ep_combine y must have dtype torch.float32, got torch.bfloat16"):
        ops.ep_combine(y.bfloat16(), source, count, out, group="")
    with pytest.raises(ValueError, match="ep_combine recv_source must have dtype torch.int64, got torch.int32"):
        ops.ep_combine(y, source.int(), count, out, group="")
    with pytest.raises(ValueError, match=r"ep_combine out must have shape \[T, 24\], got \[6, 23\]"):
        ops.ep_combine(y, source, count, out[:, 1:], group="")
    with pytest.raises(ValueError, match=r"ep_combine recv_count must have shape \[1\], got \[2\]"):
        ops.ep_combine(y, source, count.repeat(2), out, group="")
