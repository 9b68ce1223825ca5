import pytest
import torch

from dsv4.ops import shapes
from dsv4.ops._example_rows import example_rows


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 5, 64, 1200])
def test_metadata_is_consistent(num_tokens, pad):
    r = example_rows(shapes.tiny, num_tokens=num_tokens, device=torch.device("cpu"), seed=num_tokens, pad=pad)
    valid, num_requests = int(r.num_valid), r.seq_lens.numel()
    assert valid == num_tokens - int(pad and num_tokens > 1)
    for field in (r.positions, r.row_requests, r.window_slots):
        assert field.shape == (num_tokens,) and (field[valid:] == -1).all()
    assert r.query_starts.shape == (num_requests + 1,) and int(r.query_starts[-1]) == valid
    for row in range(valid):
        request, position = int(r.row_requests[row]), int(r.positions[row])
        first, end = r.query_starts[request : request + 2].tolist()
        assert first <= row < end and position - int(r.positions[first]) == row - first
        assert 0 < position < int(r.seq_lens[request]) <= r.max_context
        page = int(r.window_tables[request, position // 128])
        assert 0 <= page < r.num_window_pages and int(r.window_slots[row]) == page * 128 + position % 128
        seen = torch.arange(max(0, position - shapes.tiny.window + 1), position + 1)
        assert (r.window_tables[request, seen // 128] >= 0).all()
        assert (r.block_tables[request, torch.arange(position + 1) // 256] >= 0).all()
    limits = ((r.block_tables, r.num_blocks), (r.window_tables, r.num_window_pages), (r.state_slots, r.num_slots))
    for table, limit in limits:
        owned = table[table >= 0]
        assert owned.unique().numel() == owned.numel() and (owned < limit).all()


def test_first_row_ends_a_window():
    for seed in range(8):
        r = example_rows(shapes.tiny, num_tokens=3, device=torch.device("cpu"), seed=seed)
        assert int(r.positions[0]) % 128 == 127
