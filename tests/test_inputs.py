"""Requests of one step write to pages and slots of their own."""

from dataclasses import replace

import pytest

from dsv4.inputs import Segment, build_inputs
from dsv4.runner import Sequence


@pytest.mark.parametrize("second, message", [
    ({}, "request 1: a window page must be its own, got 0 of request 0"),
    ({"first_block": 2, "first_page": 4}, "request 1: a state_slot must be its own, got 0 of request 0"),
    ({"first_block": -3, "first_page": 4, "state_slot": 1}, "request 1: a block must be at least 0, got -3"),
])  # fmt: skip
def test_what_two_requests_would_both_write_is_refused(second, message):
    segments = [Sequence().segment([7, 8]), Sequence(**second).segment([7, 8])]
    with pytest.raises(ValueError, match=message):
        build_inputs(segments, vocab_size=16, max_blocks=2)


def test_what_is_only_read_may_be_shared():
    """A complete prefix, and whatever a request without rows has."""
    pages = {"blocks": (0, 1), "window_pages": (-1, -1, 2), "state_slot": 0}
    first = Segment(token_ids=[1], start=256, **pages, logit_offsets=())
    second = replace(first, blocks=(0, 2), window_pages=(-1, -1, 3), state_slot=1)
    idle = replace(first, token_ids=[], start=0, blocks=(0,), window_pages=(2,))
    assert build_inputs([first, second, idle], vocab_size=16, max_blocks=2).seq_lens.tolist() == [257, 257, 0]
