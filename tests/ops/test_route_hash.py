import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import ops
from dsv4.ops.route_hash import reference

from . import plain_mhc, plain_routing as plain

VOCAB, EXPERTS, TOPK = 50, 16, 6


def arguments(num_tokens: int, table_dtype=torch.int64, id_dtype=torch.int64, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_tokens, EXPERTS, generator=g)
    table = torch.rand(VOCAB, EXPERTS, generator=g).argsort(1)[:, :TOPK].to(table_dtype)
    return logits, table, torch.randint(VOCAB, (num_tokens,), generator=g).to(id_dtype)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_matches_loops(num_tokens, table_dtype, id_dtype):
    logits, table, token_ids = arguments(num_tokens, table_dtype, id_dtype)
    ids, weights = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=2.5)
    for t, row in enumerate(logits.tolist()):
        expected = table.tolist()[token_ids[t]]
        assert ids[t].tolist() == expected
        np.testing.assert_allclose(weights[t].numpy(), plain.weights(row, expected, 2.5), rtol=2e-6)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(
    ("id_dtype", "outside"),
    [(torch.int32, [-1, VOCAB, 2**31 - 1, -(2**31)]), (torch.int64, [-1, VOCAB, 2**31 - 1, 2**40, -(2**63)])],
    ids=["int32", "int64"],
)
def test_ids_outside_the_table(id_dtype, outside):
    logits, table, token_ids = arguments(12, id_dtype=id_dtype)
    expected_ids, expected = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=1.5)
    rows = [2 * i for i in range(len(outside))]
    token_ids[rows] = torch.tensor(outside, dtype=id_dtype)
    logits[rows[0]] = math.nan
    ids, weights = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=1.5)
    assert (ids[rows] == -1).all() and (weights[rows] == 0).all()
    others = [t for t in range(12) if t not in rows]
    assert torch.equal(ids[others], expected_ids[others])
    assert torch.equal(weights[others], expected[others])


@pytest.mark.parametrize("num_valid", [0, 1, 5, 7, 100])
def test_pad_rows(num_valid):
    logits, table, token_ids = arguments(7)
    expected_ids, expected = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=1.5)
    counter = torch.tensor([num_valid], dtype=torch.int32)
    ids, weights = ops.route_hash(logits, table, token_ids, counter, scale=1.5)
    assert torch.equal(ids[:num_valid], expected_ids[:num_valid])
    assert torch.equal(weights[:num_valid], expected[:num_valid])
    assert (ids[num_valid:] == -1).all() and (weights[num_valid:] == 0).all()


def test_no_affinity_gives_no_weight():
    logits, table, token_ids = arguments(3)
    logits[1] = -200.0
    weights = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=1.5)[1]
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.5, 0.0, 1.5]))


def test_row_is_independent_of_the_batch():
    logits, table, token_ids = arguments(1025)
    full = ops.route_hash(logits, table, token_ids, plain.all_rows(logits), scale=1.5)
    for rows in (*(slice(t, t + 1) for t in range(200)), slice(7, 72), slice(64, 193), slice(960, 1025)):
        part = logits[rows].clone()
        for got, want in zip(
            ops.route_hash(part, table, token_ids[rows], plain.all_rows(part), scale=1.5), full, strict=True
        ):
            assert torch.equal(got, want[rows])


def test_golden():
    layer = plain.nano_layer(2)
    logits = layer.logits("ffn_in")
    layer.assert_recorded(*ops.route_hash(logits, layer.table, layer.token_ids, plain.all_rows(logits), scale=1.5))


def test_golden_experts_of_exact_numerics():
    """The choice depends on token ids alone, so random logits must give the recorded experts."""
    golden = plain_mhc.golden("layers_exact")
    token_ids = golden["p40.ids"]
    logits = torch.randn(len(token_ids), 16)
    ids = ops.route_hash(logits, plain.nano_layer(2).table, token_ids, plain.all_rows(logits), scale=1.5)[0]
    assert torch.equal(ids.sort(1).values, golden["p40.layer2.ffn.expert_ids"].sort(1).values)


def test_reads_nothing_back():
    """Under fake tensors a host read or a data-dependent shape raises."""
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(t) for t in (*arguments(5), torch.tensor([3], dtype=torch.int32))]
        assert [t.shape for t in reference(*args, scale=1.5)] == [(5, TOPK), (5, TOPK)]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(3, 16).half(), r"route_hash logits must have dtype torch.float32, got torch.float16"),
        (1, torch.arange(6), r"route_hash table must be 2-D int32 or int64, got 1-D torch.int64"),
        (1, torch.randn(5, 6), r"route_hash table must be 2-D int32 or int64, got 2-D torch.float32"),
        (1, torch.empty(0, 6).int(), r"route_hash table must have at least one entry, got shape \[0, 6\]"),
        (2, torch.randn(3), r"route_hash token_ids must be 1-D int32 or int64, got 1-D torch.float32"),
        (3, torch.tensor(3), r"route_hash num_valid must be \[1\] torch.int32, got \[\] torch.int64"),
    ],
)
def test_wrong_arguments(position, value, message):
    args = [*arguments(3), torch.tensor([3], dtype=torch.int32)]
    args[position] = value
    with pytest.raises(ValueError, match=message):
        ops.route_hash(*args, scale=1.5)
