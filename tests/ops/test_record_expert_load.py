from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import ops
from dsv4.ops.record_expert_load import reference

ON = torch.ones(1, dtype=torch.int32)


def arguments(num_tokens: int, num_experts: int = 16, topk: int = 6, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, num_experts + 2, (num_tokens, topk), generator=g, dtype=torch.int32)
    return ids, torch.randint(10**12, (num_experts,), generator=g)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 500])
def test_adds_occurrences(num_tokens):
    ids, counts = arguments(num_tokens)
    occurrences = Counter(ids.flatten().tolist())
    expected = [count + occurrences[expert] for expert, count in enumerate(counts.tolist())]
    assert ops.record_expert_load(ids, ON, counts) is None
    assert counts.tolist() == expected


def test_repeated_expert_counts_every_time():
    counts = torch.tensor([5, 6, 7])
    ops.record_expert_load(torch.full((1000, 6), 1, dtype=torch.int32), ON, counts)
    assert counts.tolist() == [5, 6006, 7]


def test_other_ids_are_ignored():
    ids = torch.tensor([[-1, -1, 3, 4], [2**31 - 1, -(2**31), -1, 0]], dtype=torch.int32)
    counts = torch.tensor([10, 20, 30])
    ops.record_expert_load(ids, ON, counts)
    assert counts.tolist() == [11, 20, 30]


@pytest.mark.parametrize(("enabled", "records"), [(0, False), (1, True), (7, True), (-1, True)])
def test_switch(enabled, records):
    ids, counts = arguments(20)
    before = counts.clone()
    ops.record_expert_load(ids, torch.tensor([enabled], dtype=torch.int32), counts)
    assert torch.equal(counts, before) is not records


def test_writes_a_row_of_a_larger_table():
    """Counts of one layer are a row of the model's table; its neighbours stay."""
    ids, _ = arguments(50)
    table = torch.randint(1000, (3, 16))
    expected = table.clone()
    occurrences = Counter(ids.flatten().tolist())
    expected[1] += torch.tensor([occurrences[expert] for expert in range(16)])
    ops.record_expert_load(ids, ON, table[1])
    assert torch.equal(table, expected)


def test_reads_nothing_back():
    """Under fake tensors a host read or a data-dependent shape raises."""
    with FakeTensorMode() as mode:
        ids, counts = arguments(5)
        reference(*(mode.from_tensor(t) for t in (ids, ON, counts)))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(3, 6).long(), r"record_expert_load ids must have 2 dimensions, torch.int32, got 2 dimensions"),
        (1, torch.ones(1), r"record_expert_load enabled must be \[1\] torch.int32, got \[1\] torch.float32"),
        (2, torch.zeros(16).int(), r"record_expert_load counts must be \[num_experts\] torch.int64, got \[16\] torch"),
    ],
)
def test_wrong_arguments(position, value, message):
    ids, counts = arguments(3)
    args = [ids, ON, counts]
    args[position] = value
    with pytest.raises(ValueError, match=message):
        ops.record_expert_load(*args)
