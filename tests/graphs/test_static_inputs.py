from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.graphs.buckets import Bucket, Ladder
from dsv4.graphs.packing import Layout
from dsv4.graphs.static_inputs import Extent, StaticInputs

from . import toy_step as toy

LADDER = Ladder.build(16, max_requests=4, max_entries=3)  # 1, 4, 16
STEPS = [(16, 4, 4), (1, 1, 1), (3, 2, 4), (16, 1, 0), (0, 0, 0), (4, 4, 4), (9, 3, 1)]


@pytest.fixture
def static() -> StaticInputs:
    return toy.static_inputs(LADDER)


def tensors(value) -> dict[str, torch.Tensor]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def expected(inputs: toy.Inputs, bucket: Bucket) -> dict[str, torch.Tensor]:
    """The padded step, written down field by field."""

    def padded(tensor: torch.Tensor, size: int, value: int) -> torch.Tensor:
        tail = torch.full((size - len(tensor), *tensor.shape[1:]), value, dtype=tensor.dtype)
        return torch.cat((tensor, tail))

    t, r, n = bucket.tokens, bucket.requests, bucket.logits
    return {
        "ids": padded(inputs.ids, t, -1),
        "requests": padded(inputs.requests, t, -1),
        "slots": padded(inputs.slots, t, -1),
        "starts": padded(inputs.starts, r + 1, len(inputs.ids)),
        "lengths": padded(inputs.lengths, r, 0),
        "tables": padded(inputs.tables, r, -1),
        "num_valid": inputs.num_valid,
        "logit_rows": padded(inputs.logit_rows, n, 0),
    }


def check(views: toy.Inputs, wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors(views).items():
        assert torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype, name


def test_steps_are_copied_and_padded_whatever_came_before(static):
    """Every step after every other one: a tail never shows a row of an earlier step."""
    for number, before in enumerate(STEPS):
        for after in STEPS:
            for step in (before, after):
                inputs = toy.make_inputs(*step, seed=number + sum(step))
                for bucket in LADDER.buckets:
                    if bucket.holds(*step):
                        check(static.fill(inputs, bucket), expected(inputs, bucket))


def test_a_step_without_rows(static):
    static.fill(toy.make_inputs(16, 4, 4), LADDER.largest)
    for bucket in LADDER.buckets:
        check(static.fill_pads(bucket), expected(toy.make_inputs(0, 0, 0), bucket))


def test_addresses_of_a_bucket_never_change(static):
    first = {b: {name: t.data_ptr() for name, t in tensors(static.fill_pads(b)).items()} for b in LADDER.buckets}
    for addresses in first.values():
        assert len(set(addresses.values())) == len(addresses) and all(a % 16 == 0 for a in addresses.values())
    for step in STEPS:
        bucket = LADDER.bucket_for(*step)
        views = static.fill(toy.make_inputs(*step), bucket)
        assert {name: t.data_ptr() for name, t in tensors(views).items()} == first[bucket]
        assert static.fill(toy.make_inputs(*step), bucket) is views
        assert all(t.is_contiguous() for t in tensors(views).values())


def test_fill_reads_the_step_once(static):
    inputs = toy.make_inputs(3, 2, 1)
    views = static.fill(inputs, LADDER.largest)
    inputs.ids.fill_(9)
    assert (views.ids != 9).any()


def packed(inputs: toy.Inputs) -> toy.Inputs:
    """The same step, its tensors side by side in one memory."""
    given = tensors(inputs)
    layout = Layout.of([t.shape for t in given.values()], [t.dtype for t in given.values()])
    views = layout.views(torch.empty(layout.nbytes + 48, dtype=torch.uint8)[32:])
    for view, tensor in zip(views, given.values(), strict=True):
        view.copy_(tensor)
    return toy.Inputs(**dict(zip(given, views, strict=True)))


def copies(call) -> int:
    """How many copies the call makes."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.copy_.default
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        call()
    return mode.count


def test_a_packed_step_of_the_sizes_of_its_bucket_is_one_copy(static):
    for number, before in enumerate(STEPS):
        for bucket in LADDER.buckets:
            step = (bucket.tokens, bucket.requests, bucket.logits)
            static.fill(toy.make_inputs(*before, seed=number), LADDER.bucket_for(*before))
            inputs = packed(toy.make_inputs(*step, seed=number))
            views = []
            assert copies(lambda: views.append(static.fill(inputs, bucket))) == 1
            check(views[0], expected(inputs, bucket))
            apart = replace(inputs, slots=inputs.slots.clone())  # not side by side any more
            assert copies(lambda: static.fill(apart, bucket)) == len(fields(inputs))


def test_a_packed_step_smaller_than_its_bucket(static):
    for step in STEPS:
        inputs = packed(toy.make_inputs(*step, seed=3))
        check(static.fill(inputs, LADDER.largest), expected(inputs, LADDER.largest))


def test_neighbours_by_chance_are_not_one_memory():
    shapes, dtypes = [(2,), (2,)], [torch.int64, torch.int64]
    layout = Layout.of(shapes, dtypes)
    one = torch.empty(16, dtype=torch.uint8)
    two = torch.empty(0, dtype=torch.int64).set_(one.untyped_storage(), 0, (2,))
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    assert layout.memory_of(layout.views(memory)).data_ptr() == memory.data_ptr()
    assert layout.memory_of([two, two]) is None

    class Next(torch.Tensor):  # says that it begins where the first ends
        def data_ptr(self):
            return two.data_ptr() + 16

    assert layout.memory_of([two, torch.zeros(2, dtype=torch.int64).as_subclass(Next)]) is None


def test_measure(static):
    assert [static.measure(toy.make_inputs(*step)) for step in STEPS] == STEPS


@dataclass
class Nested:
    step: toy.Inputs
    streams: torch.Tensor


def nested(step: tuple[int, int, int]) -> Nested:
    return Nested(toy.make_inputs(*step), torch.randn(step[0], 2, 3))


def test_nested_dataclasses():
    extents = {f"step.{name}": extent for name, extent in toy.EXTENTS.items()} | {"streams": Extent("tokens")}
    pads = {f"step.{n}": f"step.{p}" if isinstance(p, str) else p for n, p in toy.PADS.items()}
    static = StaticInputs(nested((1, 1, 1)), LADDER, extents=extents, pads=pads | {"streams": float("nan")})
    for step in STEPS:
        inputs, bucket = nested(step), LADDER.bucket_for(*step)
        views = static.fill(inputs, bucket)
        check(views.step, expected(inputs.step, bucket))
        assert torch.equal(views.streams[: step[0]], inputs.streams)
        assert views.streams.shape == (bucket.tokens, 2, 3) and views.streams[step[0] :].isnan().all()


def test_nbytes(static):
    tokens, requests, logits = 16, 4, 4
    sizes = [tokens * 8, tokens * 4, tokens * 8, (requests + 1) * 4, requests * 4, requests * toy.PAGES * 4, 4]
    assert static.nbytes() == sum(-(-size // 16) * 16 for size in (*sizes, logits * 8))


WRONG = [
    ("ids", lambda t: t.int(), "ids must have dtype torch.int64, got torch.int32"),
    ("slots", lambda t: t[:1], r"slots must have shape \[3\], got \[1\]"),
    ("tables", lambda t: t[:, :2], r"tables must have shape \[2, 4\], got \[2, 2\]"),
    ("starts", lambda t: t[:-1], r"lengths must have shape \[1\], got \[2\]"),
    ("num_valid", lambda t: t.repeat(2), r"num_valid must have shape \[1\], got \[2\]"),
]


@pytest.mark.parametrize("field, change, message", WRONG, ids=[w[0] for w in WRONG])
def test_a_step_that_does_not_fit_is_refused_and_nothing_written(static, field, change, message):
    before = toy.make_inputs(4, 4, 4, seed=1)
    views = static.fill(before, LADDER.buckets[1])
    inputs = toy.make_inputs(3, 2, 1)
    with pytest.raises(ValueError, match=message):
        static.fill(replace(inputs, **{field: change(getattr(inputs, field))}), LADDER.buckets[1])
    check(views, expected(before, LADDER.buckets[1]))


def test_other_refusals(static):
    with pytest.raises(ValueError, match="ids must have at most 1 rows in this bucket, got 3"):
        static.fill(toy.make_inputs(3, 1, 1), LADDER.buckets[0])
    with pytest.raises(ValueError, match="bucket must be one of the ladder's 3, got 2 tokens"):
        static.fill(toy.make_inputs(1, 1, 1), Bucket(2, 2, 2))
    with pytest.raises(TypeError, match="inputs must be a Inputs, got Nested"):
        static.fill(nested((1, 1, 1)), LADDER.largest)


@pytest.mark.parametrize(
    "extents, pads, message",
    [
        ({"ides": Extent("tokens")}, {}, r"extents must name fields of the inputs, got \['ides'\]"),
        ({}, {"x": 0}, r"pads must name fields of the inputs, got \['x'\]"),
        ({"ids": Extent("tokens")}, {}, "pads must have a value for every field with an extent, got none for ids"),
        ({"ids": Extent("tokens")}, {"ids": "slots_"}, "pad of ids must be a number or a field of fixed shape, got"),
        ({"ids": Extent("tokens")}, {"ids": "tables"}, "pad of ids must be a field of 1 element, got 4 in tables"),
    ],
)
def test_rules_are_checked(extents, pads, message):
    with pytest.raises(ValueError, match=message):
        StaticInputs(toy.make_inputs(1, 1, 1), LADDER, extents=extents, pads=pads)


def test_only_dataclasses_of_tensors():
    with pytest.raises(TypeError, match="example must be a dataclass instance, got dict"):
        StaticInputs({}, LADDER, extents={}, pads={})
    with pytest.raises(TypeError, match="ids of the inputs must be a tensor or a dataclass, got int"):
        StaticInputs(replace(toy.make_inputs(1, 1, 1), ids=3), LADDER, extents={}, pads={})


@pytest.mark.gpu
def test_fill_does_not_synchronise_the_device():
    static = toy.static_inputs(LADDER, "cuda")
    steps = [toy.make_inputs(*step, device="cuda") for step in STEPS]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        views = [static.fill(step, LADDER.largest) for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = toy.Inputs(**{name: t.cpu() for name, t in tensors(steps[-1]).items()})
    check(toy.Inputs(**{name: t.cpu() for name, t in tensors(views[-1]).items()}), expected(on_cpu, LADDER.largest))
