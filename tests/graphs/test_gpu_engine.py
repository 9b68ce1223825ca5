"""Engines of the nano checkpoint that replay graphs on a GPU: what simulated hardware cannot show.

One engine per process-wide setting is shared by the tests that only measure it. All say how many blocks they want: the
default would take the device's memory.
"""

import gc
import logging

import pytest
import torch

from dsv4 import ops
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.graphs.buckets import Ladder
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.device_graphs import CudaGraphs
from dsv4.graphs.jit_monitor import JitMonitor
from dsv4.graphs.pieces import CaptureError, CaptureMemoryError, StaleAddressError
from dsv4.hardware import CudaHardware
from dsv4.ops._jit_libraries import jit_libraries
from dsv4.start_up import LATE_SECONDS
from tools.gpu_check.models import SharedGpu

from ..conftest import NANO
from ..engines import greedy
from . import gpu_measure, gpu_poison, toy_step as toy

pytestmark = pytest.mark.gpu
PROMPT = "Ge 1:1 In the beginning"
CASES = [  # numerics, cache storage, graphs, compile: an engine each; the GPU report measures more of them
    ("official", "fp8", "full", "off"),
    ("exact", "bf16", "piecewise", "piecewise"),
]
IDS = ["-".join(case[:3]) for case in CASES]


def settings_of(numerics: str = "official", storage: str = "fp8", graphs: str = "full", compile: str = "off", **more):
    return EngineConfig(**{
        "numerics": numerics, "cache_storage": storage, "graphs": graphs, "compile": compile, "device": "cuda",
        "max_seq_len": 768, "max_requests": 4, "token_budget": 64, "num_blocks": 12, "draft_tokens": 1,
    } | more)  # fmt: skip


def load(*case: str, **more) -> Engine:
    return Engine.from_checkpoint(NANO, settings_of(*case, **more), progress=False)


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def engine(request):
    """Deterministic, so that it can be compared with padded and with unpadded calls."""
    with load(*request.param, deterministic=True) as made:
        yield made
    gc.collect()
    torch.cuda.empty_cache()


def test_device_replay_is_eager_on_the_same_padded_batch(engine):
    found = gpu_measure.replay_differences(engine, padded=True)
    assert gpu_measure.total(found) == 0, found
    assert found.keys() == {"step", "draft"} and all("decode" in kinds for kinds in found.values())


def test_device_replay_is_the_unpadded_call_when_deterministic(engine):
    found = gpu_measure.replay_differences(engine, padded=False)
    assert gpu_measure.total(found) == 0, found


def test_device_poison_changes_nothing(engine):
    found = gpu_poison.poison_differences(engine)
    assert gpu_poison.all_clean(found), found


def test_device_start_up_in_numbers(engine):
    """Every stage has its row, little compiled late, the trial foretold the capture, and ready means ready."""
    started = engine.started
    rows = {row.stage: row for row in started.table()}
    stages = ("load", "prewarm", "barrier", "warm", "trial", "empty", "caches", "capture step", "capture draft")
    assert set(stages) <= rows.keys()
    assert rows["prewarm"].keys > 0 and rows["load"].mib > 0
    assert [late for late in started.late_compilations if late.seconds > LATE_SECONDS] == []
    for name, report in started.capture_reports.items():
        first, *rest = (bucket.mib for bucket in report.buckets)
        foretold = started.trials[name].pool_bytes / 2**20
        assert foretold > 0 and abs(first - foretold) <= 20, (name, report, foretold)  # 20 MiB: the allocator's segment
        assert max(rest) <= 20, report  # where a smaller bucket's sizes leave a gap
        assert rows[f"capture {name}"].graphs >= len(started.captured[name].ladder.buckets)
    with JitMonitor("count", libraries=jit_libraries()) as monitor:
        engine.generate([PROMPT], greedy(8))
    report = monitor.report()
    assert (report.compilations, report.loads) == (0, 0), report.libraries
    assert {kind for step in started.captured.values() for kind in step.path_counts} <= {"full", "piecewise", "eager"}


def test_device_rows_alone_and_among_others():
    """C10 through graphs: 64 rows alone and inside 65, 129 and 4,225 rows, bitwise."""
    with load(
        deterministic=True, token_budget=4352, max_requests=16, draft_tokens=4, max_seq_len=4608, num_blocks=40
    ) as made:  # fmt: skip
        found = {total: gpu_measure.rows_alone_and_among(made, total) for total in (65, 129, 4225)}
    assert found == {65: 0, 129: 0, 4225: 0}


def test_device_debug_graphs_find_a_cache_that_moved():
    with load(debug_graphs=True, draft_tokens=0) as made:
        assert made.generate([PROMPT], greedy(4))[0].error is None
        inputs, caches = made.runner.inputs([gpu_measure.placed(made, 0).segment([5, 6, 7], (2,))]), made.runner.caches
        caches.layers[2].state = caches.layers[2].state.clone()
        with pytest.raises(StaleAddressError, match=r"watched tensor 13 must be \[4, \d+, \d+\] at"):
            made.runner.step(inputs, caches)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_device_tokens_are_those_of_an_eager_engine(draft_tokens):
    """Two engines in one process, in turn, with the default of graphs for one of them."""
    prompts = [PROMPT, "Blessed are the", "hacker: n. A person who"]
    more = {"deterministic": True, "draft_tokens": draft_tokens}
    with load(graphs=None, **more) as graphed, load(graphs="off", **more) as eager:
        assert eager.started.captured == {} and "capture" not in eager.started.seconds
        for _ in range(2):
            got, want = (e.generate(prompts, greedy(24)) for e in (graphed, eager))
            assert [c.token_ids for c in got] == [c.token_ids for c in want]
        paths = {name: dict(step.path_counts) for name, step in graphed.started.captured.items()}
        assert paths.keys() == ({"step", "draft"} if draft_tokens else {"step"})
        assert all(counts.keys() == {"full"} for counts in paths.values()), paths


class Small(SharedGpu):
    """A device of 4 GiB with 3 GiB free, whatever else runs on the real one."""

    def free_and_total_bytes(self) -> tuple[int, int]:
        free, total = super().free_and_total_bytes()
        assert 0 < free <= total
        return 3 << 30, 4 << 30


def test_device_caches_take_what_is_left_and_close_gives_it_back(model):
    """Sized without ``num_blocks``; a second engine of the same model leaves no more behind than the first."""
    reserved = []
    for _ in range(2):
        settings = settings_of(num_blocks=None, draft_tokens=1)
        made = Engine.from_model(model, settings, progress=False, hardware=Small(model.embed.device, "full"))
        plan = made.started.caches
        assert plan.source == "measured" and made.runner.caches.bytes() == plan.cache_bytes
        room = plan.memory.free - plan.memory.graphs - plan.memory.transient - 0.1 * plan.memory.total
        assert 0.75 * room < plan.cache_bytes <= room  # what is missing is the allocator's rounding of 50 tensors
        assert torch.cuda.memory_reserved() >= plan.cache_bytes
        made.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        assert plan.cache_bytes > 1 << 30
    assert reserved[1] <= reserved[0]


class Tight(CudaHardware):
    """The device's memory ends once the trial begins."""

    def transient_bytes(self) -> int:
        taken = super().transient_bytes()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
        return taken

    def release_cached(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        super().release_cached()


@pytest.fixture(scope="module")
def model():
    with load(draft_tokens=0, graphs="off") as made:
        yield made.runner.model


def test_device_auto_out_of_memory_serves_eagerly_and_says_so(model, caplog):
    settings = settings_of(graphs="auto", draft_tokens=0)
    with caplog.at_level(logging.ERROR, logger="dsv4.start_up"):
        made = Engine.from_model(model, settings, progress=False, hardware=Tight(model.embed.device, "auto"))
    with made:
        assert isinstance(made.started.capture_error, CaptureMemoryError) and "run eagerly" in caplog.text
        assert made.generate([[5, 6, 7]], greedy(4))[0].error is None
        assert made.started.captured["step"].last_path.reason.startswith("capture failed: bucket of 64 tokens")


def test_device_full_out_of_memory_raises_and_leaves_the_model_usable(model):
    settings = settings_of(draft_tokens=0)
    with pytest.raises(CaptureMemoryError, match="bucket of 64 tokens, .* must fit into device memory"):
        Engine.from_model(model, settings, progress=False, hardware=Tight(model.embed.device, "full"))
    with Engine.from_model(model, settings, progress=False) as made:
        assert made.generate([[5, 6, 7]], greedy(4))[0].error is None
        assert set(made.started.captured["step"].path_counts) == {"full"}


def test_device_cold_key_under_capture_is_named():
    """A width that nobody warmed, met by a captured step alone: the capture stops before anything compiles."""
    weight, odd = (torch.randn(width, device="cuda") for width in (512, 1237))
    ops.rms_norm(torch.randn(3, 512, device="cuda"), weight, eps=1e-6)

    def step(inputs: toy.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        width = 1237 if torch.cuda.is_current_stream_capturing() else 512
        x = inputs.ids.float().unsqueeze(1).expand(-1, width).contiguous()
        y = ops.rms_norm(x, odd if width == 1237 else weight, eps=1e-6)
        return y[inputs.logit_rows], y

    ladder = Ladder(toy.LADDER.buckets[:1])
    captured = CapturedStep(
        step, toy.static_inputs(ladder, "cuda"), ladder, CudaGraphs(), arguments=lambda inputs: (inputs,),
        trim=("logits", "tokens"),
    )  # fmt: skip
    with (
        JitMonitor("count", libraries=jit_libraries()) as monitor,
        pytest.raises(
            CaptureError, match=r"ColdKernelError: kernel specialisation must be warm .* got cold key .*rms_norm.*1237"
        ),
    ):
        captured.capture(lambda: None)
    assert monitor.report().compilations == 0
