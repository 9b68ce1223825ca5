"""The JIT monitor: real Triton (and TileLang where installed) compilations, modes, chaining, absent libraries."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from dsv4.compile import compile_model, jit_events
from dsv4.graphs.jit_libraries import WATCHES
from dsv4.graphs.jit_monitor import JitError, JitMonitor, KeyCounts, check_fires
from dsv4.ops._jit_libraries import NAMES, jit_libraries

from .kernels import NoDevice, compile_directly, launch_up_to_the_device, scale_rows

ROOT = Path(__file__).resolve().parents[2]
TRITON = {"triton": triton, "tilelang": "not part of this test"}
NOTHING = {"triton": "not part of this test", "tilelang": "not part of this test"}


@pytest.fixture(autouse=True)
def cold_triton(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice())
    scale_rows.device_caches.clear()
    yield
    scale_rows.device_caches.clear()
    assert triton.knobs.runtime.jit_cache_hook is None and triton.knobs.compilation.listener is None


@pytest.fixture
def real_driver(monkeypatch, cold_triton):
    """Inductor asks Triton's driver for its target, keeps the answer for the life of the process, and writes it into
    pieces: with the answer of a stand-in, whatever this process compiles later would load in no other one."""
    monkeypatch.setattr(triton.runtime.driver, "_active", None)


def counts(monitor: JitMonitor, library: str = "triton") -> tuple[int, int]:
    total = monitor.report().total(library)
    return total.compilations, total.loads


def test_direct_compilations_and_loads_are_told_apart():
    with JitMonitor(libraries=TRITON) as monitor:
        compile_directly(64)
        assert counts(monitor) == (1, 0)
        compile_directly(64)
        compile_directly(128)
    assert counts(monitor) == (2, 1)
    keys = monitor.report().libraries["triton"]
    assert len(keys) == 2
    small = next(each for key, each in keys.items() if "WIDTH=64" in key)
    assert (small.compilations, small.loads) == (1, 1) and small.seconds > 0
    assert all("scale_rows[warps=4, stages=3](x_ptr=*fp32" in key for key in keys)


def test_a_launch_counts_once():
    """The listener and both launch hooks fire for a launch; it is one event under one key."""
    with JitMonitor(libraries=TRITON) as monitor:
        started = time.perf_counter()
        launch_up_to_the_device(64)
        wall = time.perf_counter() - started
        assert counts(monitor) == (1, 0)
        launch_up_to_the_device(64)  # warm in this process: no event
        assert counts(monitor) == (1, 0)
        scale_rows.device_caches.clear()  # as in a new process
        launch_up_to_the_device(64)
    assert counts(monitor) == (1, 1)
    ((key, each),) = monitor.report().libraries["triton"].items()
    assert key.startswith(f"{scale_rows.fn.__module__}.scale_rows[") and "WIDTH=64" in key
    assert 0 < each.seconds
    assert each.seconds < 2 * wall


def test_raise_refuses_a_launch_before_it_compiles(tmp_path):
    monitor = JitMonitor("raise", libraries=TRITON)
    with monitor, pytest.raises(JitError, match=r"must be warm, got a cold key of triton: .*scale_rows.*WIDTH=64"):
        launch_up_to_the_device(64)
    assert not list(tmp_path.rglob("*.cubin"))
    assert counts(monitor) == (0, 0) and len(monitor.report().refused["triton"]) == 1
    launch_up_to_the_device(64)  # a refused launch leaves nothing behind
    with monitor:
        launch_up_to_the_device(64)  # warm
    assert list(tmp_path.rglob("*.cubin"))


def test_raise_reports_a_direct_compilation_afterwards():
    with JitMonitor("raise", libraries=TRITON), pytest.raises(JitError, match="got a compile by triton of .*WIDTH=64"):
        compile_directly(64)
    with JitMonitor("raise", libraries=TRITON), pytest.raises(JitError, match="got a load by triton of .*WIDTH=64"):
        compile_directly(64)


def test_a_planted_wrong_key_is_caught():
    """A key that leaves out what selects the binary looks warm; the library compiles all the same."""
    warm = set()

    def run(width: int) -> None:
        launch_up_to_the_device(width)
        warm.add("scale_rows")  # wrong: the width is part of the specialisation

    run(64)
    assert "scale_rows" in warm
    with JitMonitor("raise", libraries=TRITON), pytest.raises(JitError, match="WIDTH=128"):
        run(128)


def test_warn_logs_every_event(caplog):
    with caplog.at_level(logging.WARNING), JitMonitor("warn", libraries=TRITON) as monitor:
        launch_up_to_the_device(64)
    assert counts(monitor) == (1, 0)
    (record,) = caplog.records
    assert "triton compiled" in record.getMessage() and "WIDTH=64" in record.getMessage()


def test_hooks_that_were_there_before_still_fire(monkeypatch):
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **event: seen.append("launch"))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: seen.append(event["cache_hit"]))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: seen.append("done"))
    before = triton.knobs.runtime.jit_cache_hook
    with JitMonitor(libraries=TRITON) as monitor:
        launch_up_to_the_device(64)
    assert seen == ["launch", False, "done"] and counts(monitor) == (1, 0)
    assert triton.knobs.runtime.jit_cache_hook is before
    monkeypatch.undo()


def test_monitors_nest_and_close_in_any_order():
    outer, inner = JitMonitor(libraries=TRITON), JitMonitor(libraries=TRITON)
    outer.__enter__()
    inner.__enter__()
    compile_directly(64)
    outer.__exit__(None, None, None)
    compile_directly(128)
    inner.__exit__(None, None, None)
    assert counts(outer) == (1, 0) and counts(inner) == (2, 0)
    compile_directly(256)
    assert counts(outer) == (1, 0) and counts(inner) == (2, 0)
    for name in ("jit_cache_hook", "jit_post_compile_hook"):  # outer's hooks, which let everything pass
        setattr(triton.knobs.runtime, name, None)
    triton.knobs.compilation.listener = None


def test_a_displaced_listener_does_not_hide_a_launch(monkeypatch):
    with JitMonitor(libraries=TRITON) as monitor:
        monkeypatch.setattr(triton.knobs.compilation, "listener", None)
        launch_up_to_the_device(64)
        assert counts(monitor) == (1, 0)
        monkeypatch.undo()


def test_threads_are_seen():
    with JitMonitor(libraries=TRITON) as monitor:
        threads = [threading.Thread(target=launch_up_to_the_device, args=(width,)) for width in (32, 64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(monitor) == (2, 0)


def test_absent_libraries_are_listed_and_not_zero():
    with JitMonitor(libraries=NOTHING | {"tilelang": "not installed"}) as monitor:
        compile_directly(64)
    report = monitor.report()
    assert report.absent == {"triton": "not part of this test", "tilelang": "not installed"} and report.libraries == {}
    with pytest.raises(ValueError, match=r"library must be one of \[\], got 'tilelang'"):
        report.total("tilelang")
    assert report.to_dict()["absent"]["tilelang"] == "not installed"


def test_a_library_without_its_hooks_is_unwatched(caplog):
    changed = ModuleType("tilelang")
    changed.JITKernel, changed.__version__ = type("JITKernel", (), {"from_database": classmethod(print)}), "9.9"
    libraries = NOTHING | {"tilelang": changed}
    with caplog.at_level(logging.WARNING), JitMonitor(libraries=libraries) as monitor:
        pass
    reason = "tilelang.JITKernel._compile_and_create_adapter does not exist in tilelang 9.9"
    assert monitor.report().unwatched == {"tilelang": reason}
    assert reason in caplog.text
    with pytest.raises(RuntimeError, match="must have the hooks of the JIT monitor in mode 'raise', got .*9.9"):
        JitMonitor("raise", libraries=libraries).__enter__()
    older = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None)), __version__="1")
    monitor = JitMonitor(libraries=NOTHING | {"triton": older})
    assert monitor.report().unwatched == {"triton": "triton.knobs.compilation.listener does not exist in triton 1"}


class FakeKernel:
    """The two methods of TileLang's class, with its calling conventions."""

    def __init__(self, func, out_idx=None):
        self.result = self._compile_and_create_adapter(func, out_idx)

    def _compile_and_create_adapter(self, tilelang_func, out_idx):
        return f"compiled {tilelang_func} {out_idx}"

    @classmethod
    def from_database(cls, func, path):
        kernel = cls.__new__(cls)
        kernel.result = f"loaded {func} {path}"
        return kernel


def test_wrapped_methods_keep_their_results_and_leave_no_trace():
    library = SimpleNamespace(JITKernel=FakeKernel, __version__="fake")
    originals = dict(vars(FakeKernel))
    with JitMonitor(libraries=NOTHING | {"tilelang": library}) as monitor:
        assert FakeKernel("f", 1).result == "compiled f 1"
        assert FakeKernel.from_database(func="f", path="p").result == "loaded f p"
        assert FakeKernel("g").result == "compiled g None"
    assert counts(monitor, "tilelang") == (2, 1)
    assert len(monitor.report().libraries["tilelang"]) == 2
    assert dict(vars(FakeKernel)) == originals
    strict = JitMonitor("raise", libraries=NOTHING | {"tilelang": library})
    for cold in (lambda: FakeKernel("f"), lambda: FakeKernel.from_database("f", "p")):
        with strict, pytest.raises(JitError, match="got a cold key of tilelang: kernel#"):
            cold()
    assert counts(strict, "tilelang") == (0, 0) and len(strict.report().refused["tilelang"]) == 2


@pytest.mark.slow  # runs the C compiler four times
def test_tilelang_itself(monkeypatch, tmp_path):
    import tilelang

    from .tilelang_kernel import compile_for_cpu

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    libraries = NOTHING | {"tilelang": tilelang}
    with JitMonitor(libraries=libraries) as monitor:
        compile_for_cpu(32)
        assert counts(monitor, "tilelang") == (1, 0)
        compile_for_cpu(32)  # in this process's memory
        assert counts(monitor, "tilelang") == (1, 0)
        compile_for_cpu(64)
        assert counts(monitor, "tilelang") == (2, 0)
    assert len(monitor.report().libraries["tilelang"]) == 2
    with JitMonitor("raise", libraries=libraries), pytest.raises(JitError, match="cold key of tilelang: add_one#"):
        compile_for_cpu(128)
    another = [sys.executable, "-m", "tests.graphs.tilelang_kernel"]  # a new process loads
    assert subprocess.check_output(another, cwd=ROOT, text=True).splitlines()[-1] == "0 1"


def inductor() -> dict[str, KeyCounts]:
    return {key: KeyCounts(*events) for key, events in jit_events().items()}


def product_piece(directory: Path) -> tuple[int, int]:
    """Pieces of a matrix product that were loaded from ``directory`` and that were compiled."""
    model = compile_model(lambda x: (x.mm(x),), cache_dir=directory)
    model.prepare(torch.eye(4))
    return model.report.cache_hits, model.report.cache_misses


def test_inductor_itself(real_driver, monkeypatch, tmp_path):
    """Matrix products are calls of a library, so Inductor's code is Python and no C++ compiler runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compile_products(count: int) -> None:
        torch.compiler.reset()  # as in a new process
        assert torch.compile(lambda x: x.mm(x) if count == 1 else x.mm(x).mm(x))(torch.eye(4)).sum() == 4

    with JitMonitor(libraries=NOTHING, counters={"inductor": inductor}) as monitor:
        compile_products(1)
        assert counts(monitor, "inductor") == (1, 0)
        compile_products(1)
        assert counts(monitor, "inductor") == (1, 1)
        compile_products(2)
    keys = monitor.report().libraries["inductor"]
    assert sorted((each.compilations, each.loads) for each in keys.values()) == [(1, 0), (1, 1)]
    assert all(each.seconds > 0 for each in keys.values())
    (again,) = (key for key, each in keys.items() if each.loads == 0)
    with pytest.raises(JitError, match=f"must be warm, got .*'inductor': .*{again}"):  # noqa: SIM117
        with JitMonitor("raise", libraries=NOTHING, counters={"inductor": inductor}):
            compile_products(2)
    assert product_piece(tmp_path / "pieces") == (0, 1)
    program = "from tests.graphs.test_jit_monitor import *; print(product_piece(Path(sys.argv[1])))"
    another = [sys.executable, "-c", program, tmp_path / "pieces"]
    assert subprocess.check_output(another, cwd=ROOT, text=True).splitlines()[-1] == "(1, 0)"


@pytest.mark.slow
def test_compile_reports_are_counted(real_driver, tmp_path):
    """Inductor through the public report of ``dsv4.compile``: a cold directory compiles, a filled one loads."""
    compiled = {}

    def inductor() -> dict[str, KeyCounts]:
        reports = {name: each.report for name, each in compiled.items()}
        return {
            name: KeyCounts(r.num_distinct_pieces - r.cache_hits, r.cache_hits, r.seconds.compile + r.seconds.load)
            for name, r in reports.items()
        }

    def make(name: str, factor: float) -> None:
        model = compile_model(lambda x: (x * factor,), cache_dir=tmp_path / "pieces")
        model.prepare(torch.ones(3))
        compiled[name] = model

    with JitMonitor(libraries=NOTHING, counters={"inductor": inductor}) as monitor:
        make("cold", 2.0)
        assert counts(monitor, "inductor") == (1, 0)
        make("loaded", 2.0)
    assert counts(monitor, "inductor") == (1, 1)
    with pytest.raises(JitError, match=r"must be warm, got \{'inductor': \['again'\]\}"):  # noqa: SIM117
        with JitMonitor("raise", libraries=NOTHING, counters={"inductor": inductor}):
            make("again", 2.0)


def test_counters_count_only_what_happens_inside():
    total = {"a": KeyCounts(3, 1, 2.0)}
    monitor = JitMonitor(libraries=NOTHING, counters={"other": lambda: total})
    with monitor:
        assert counts(monitor, "other") == (0, 0)
        total["a"] += KeyCounts(1, 0, 0.5)
        total["b"] = KeyCounts(0, 2, 0.25)
        assert counts(monitor, "other") == (1, 2)
    total["a"] += KeyCounts(5, 5, 5.0)  # outside
    assert monitor.report().libraries["other"] == {"a": KeyCounts(1, 0, 0.5), "b": KeyCounts(0, 2, 0.25)}
    with monitor:
        total["a"] += KeyCounts(1, 0, 0.5)
    assert counts(monitor, "other") == (2, 2)


def test_check_fires():
    assert "WIDTH=64" in check_fires("triton", lambda: compile_directly(64), TRITON)
    with pytest.raises(RuntimeError, match="must see a cold kernel of triton, got no event"):
        check_fires("triton", lambda: None, TRITON)
    with pytest.raises(RuntimeError, match="must see a cold kernel of tilelang, got not part of this test"):
        check_fires("tilelang", lambda: None, TRITON)


def test_refused_arguments():
    with pytest.raises(ValueError, match=r"mode must be one of \('count', 'warn', 'raise'\), got 'error'"):
        JitMonitor("error", libraries=TRITON)
    with pytest.raises(ValueError, match=r"libraries must be \['tilelang', 'triton'\], .* got \['triton'\]"):
        JitMonitor(libraries={"triton": triton})
    with pytest.raises(ValueError, match="counters must be of other libraries"):
        JitMonitor(libraries=TRITON, counters={"triton": dict})
    with JitMonitor(libraries=TRITON) as monitor, pytest.raises(RuntimeError, match="opened once at a time"):
        monitor.__enter__()


def test_the_libraries_of_this_process():
    found = jit_libraries()
    assert set(found) == set(NAMES) == set(WATCHES)
    assert found["triton"] is triton
    assert JitMonitor(libraries=found).report().unwatched == {}


@pytest.mark.gpu
def test_launches_on_the_device(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", None)  # the real driver
    x = torch.ones(100, device="cuda")
    with JitMonitor(libraries=TRITON) as monitor:
        scale_rows[(2,)](x, 100, WIDTH=64)
        assert counts(monitor) == (1, 0)
        scale_rows[(1,)](x, 17, WIDTH=64)  # a run-time count is no new key
        assert counts(monitor) == (1, 0)
        scale_rows.device_caches.clear()
        scale_rows[(2,)](x, 100, WIDTH=64)
    assert counts(monitor) == (1, 1)
    with JitMonitor("raise", libraries=TRITON), pytest.raises(JitError, match="WIDTH=128"):
        scale_rows[(1,)](x, 100, WIDTH=128)
    expected = torch.full((100,), 4.0)
    expected[:17] = 8.0
    assert torch.equal(x.cpu(), expected)
