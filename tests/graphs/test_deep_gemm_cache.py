"""Reading DeepGEMM's cache and a child's print: the library's own text, wrong keys that are caught, compiling ahead."""

import json
import logging
import textwrap
from pathlib import Path

import filelock
import pytest

from dsv4.graphs import deep_gemm_cache
from dsv4.graphs.deep_gemm_cache import KeyModelError, compile_ahead, confirm, instantiation, observe, parse, snapshot
from dsv4.graphs.jit_monitor import JitError, JitMonitor
from dsv4.ops import _deep_gemm_keys as keys

NOTHING = {"triton": "not part of this test", "tilelang": "not part of this test"}
# As DeepGEMM 2.5.0.post20260604 wrote and printed it on an H200, for one child's calls and for a second child's.
RECORD = json.loads((Path(__file__).parent / "deep_gemm_record.json").read_text())


@pytest.fixture
def cache(tmp_path) -> Path:
    """The recorded cache directory; binaries are empty, nobody reads them."""
    for name, source in RECORD["entries"].items():
        entry = tmp_path / "cache" / name
        entry.mkdir(parents=True)
        (entry / "kernel.cu").write_text(source)
        (entry / "kernel.cubin").touch()
    (tmp_path / "tmp" / "half-written").mkdir(parents=True)
    (tmp_path / "cache" / "kernel.unfinished.0").mkdir()
    return tmp_path


def test_sources_hold_the_keys(cache):
    found = set(snapshot(cache).values())
    assert found == {
        keys.gemm(1, 1024, 4096, 132), keys.gemm(17, 1024, 4096, 132), keys.mqa_logits(64, 128, 132),
    }  # fmt: skip


def test_a_cold_and_a_warm_child(cache):
    """Four calls, the second under the key of the first: three loads, after compilations or from disk."""
    after = snapshot(cache)
    cold = parse(RECORD["cold"], before={}, after=after)
    assert [len(call.loaded) for call in cold.calls] == [1, 0, 1, 1] and cold.compiled == after.keys()
    found = confirm(cold)
    assert {after[entry] for entry in found.values()} == set(found) and len(found) == 3
    assert all(ms > 0 for ms in cold.load_ms.values()) and cold.load_ms.keys() == after.keys()
    again = parse(RECORD["again"], before=after, after=after)
    assert confirm(again) == found and not again.compiled


def test_a_planted_wrong_key_is_caught(cache):
    """The child announced names without arguments, as if the tile were no part of the key."""
    after = snapshot(cache)
    with pytest.raises(KeyModelError, match=r"key must name what was built, .*16, 16, 128.* got .*impl'\)"):
        confirm(parse(RECORD["wrong"], before=after, after=after))


def lines(*calls: tuple[tuple, list[str]]) -> str:
    text = []
    for key, loaded in calls:
        text.append(f"deep_gemm call {json.dumps(key)}")
        text += [f"Load time (/somewhere/cache/{entry}): 0.20 ms" for entry in loaded]
    return "\n".join(text)


A, B = ("deep_gemm", "f", 1), ("deep_gemm", "f", 2)


@pytest.mark.parametrize(
    "text, before, message",
    [
        (lines((A, ["a"]), (A, ["b"])), {}, "must stand for 1 kernel, got a and .'b',"),
        (lines((A, ["a"]), (B, [])), {"b": B}, "must load 1 kernel, got none: another key stands for the same one"),
        (lines((A, ["a", "b"])), {}, "must load 1 kernel, got .'a', 'b'"),
        (lines((B, ["a"])), {"b": B}, r"must name what was built, .*'f', 1.*, got .*'f', 2"),
        (lines((A, ["a"])), {}, r"every compilation must belong to a call, got \['b'\]"),
    ],
    ids=["two kernels under a key", "two keys of a kernel", "two at once", "another kernel", "compiled unseen"],
)
def test_models_that_are_refused(text, before, message):
    with pytest.raises(KeyModelError, match=message):
        confirm(parse(text, before=before, after={"a": A, "b": B}))


def test_a_load_before_the_first_call_is_no_observation():
    with pytest.raises(ValueError, match="a load must belong to an announced call"):
        parse("Load time (/x/cache/a): 0.1 ms\n" + lines((A, [])), before={}, after={})


def test_instantiations():
    source = "auto ptr = reinterpret_cast<void*>(&f<\n 1, a::B::C,\n true, -2\n >);\n"
    assert instantiation(source) == ("deep_gemm", "f", 1, "C", "true", -2)
    for wrong in ("int main();", source + source):
        with pytest.raises(ValueError, match="must instantiate 1 kernel, got [02]"):
            instantiation(wrong)


FOREIGN = {
    "no source": lambda source: None,
    "a directory": lambda source: source.mkdir(),
    "another template": lambda source: source.write_text("int main();"),
    "two kernels": lambda source: source.write_text("&f<1>); &f<2>);"),
    "no text": lambda source: source.write_bytes(b"&f<1>); \xff"),
}


@pytest.mark.parametrize("plant", FOREIGN.values(), ids=FOREIGN)
def test_entries_of_other_programs_are_left_out(cache, caplog, plant):
    """The directory is shared. In a child's cache, where every kernel must be accounted for, they are errors."""
    own = snapshot(cache)
    entry = cache / "cache" / "kernel.foreign.0"
    entry.mkdir()
    (entry / "kernel.cubin").touch()
    plant(entry / "kernel.cu")
    with caplog.at_level(logging.DEBUG, logger=deep_gemm_cache.__name__):
        assert snapshot(cache) == own and len(own) == 3
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{entry} is left out, another program's: ")
    assert len(deep_gemm_cache.counter(cache)()) == 3
    with pytest.raises((OSError, ValueError)):
        snapshot(cache, strict=True)
    with pytest.raises((OSError, ValueError)):
        observe(["-c", ""], cache, timeout=60)


def test_a_child_that_compiles_what_cannot_be_read_is_no_observation(tmp_path):
    source = (
        f"import pathlib; entry = pathlib.Path({str(tmp_path)!r}, 'cache', 'kernel.f.0'); entry.mkdir(parents=True); "
        "(entry / 'kernel.cu').write_text('int main();'); (entry / 'kernel.cubin').touch()"
    )
    with pytest.raises(ValueError, match="must instantiate 1 kernel, got 0"):
        observe(["-c", source], tmp_path, timeout=60)


def test_the_monitor_counts_what_appears(cache):
    entry = cache / "cache" / "kernel.another.1"
    with JitMonitor(libraries=NOTHING, counters={"deep_gemm": deep_gemm_cache.counter(cache)}) as monitor:
        assert monitor.report().total("deep_gemm").compilations == 0
        entry.mkdir()
        (entry / "kernel.cu").write_text("&g<7>);")
        (entry / "kernel.cubin").touch()
    assert {key: each.compilations for key, each in monitor.report().libraries["deep_gemm"].items()} == {"g/7": 1}
    counters = {"deep_gemm": deep_gemm_cache.counter(cache)}
    with pytest.raises(JitError, match="'deep_gemm': .'g/8'"):  # noqa: SIM117
        with JitMonitor("raise", libraries=NOTHING, counters=counters):
            (cache / "cache" / "kernel.one.2").mkdir()
            (cache / "cache" / "kernel.one.2" / "kernel.cu").write_text("&g<8>);")
            (cache / "cache" / "kernel.one.2" / "kernel.cubin").touch()


# A stand-in for the library in a child: it writes an entry and prints through C what DeepGEMM prints.
CHILD = textwrap.dedent(
    """
    import ctypes, json, os, sys, pathlib
    from dsv4.graphs.deep_gemm_cache import announce
    libc = ctypes.CDLL(None)
    for number in json.loads(sys.argv[1]):
        if number < 0:
            sys.exit("cannot compile")
        entry = pathlib.Path(os.environ.get("DG_JIT_CACHE_DIR") or sys.argv[2], "cache", f"kernel.f.{number}")
        announce(("deep_gemm", "f", number))
        entry.mkdir(parents=True)
        (entry / "kernel.cu").write_text(f"&f<{number}>);")
        (entry / "kernel.cubin").touch()
        if os.environ.get("DG_JIT_PRINT_LOAD_TIME") == "1":
            libc.printf(f"Load time ({entry}): 0.25 ms\\n".encode())
    """
)


def test_a_child_is_observed(tmp_path):
    seen = observe(["-c", CHILD, "[3, 5]"], tmp_path, timeout=60)
    assert confirm(seen) == {("deep_gemm", "f", n): f"kernel.f.{n}" for n in (3, 5)} and len(seen.compiled) == 2
    with pytest.raises(RuntimeError, match="the child must succeed, got exit status 1: (?s:.*)FileExistsError"):
        observe(["-c", CHILD, "[3]"], tmp_path, timeout=60)


def test_compiling_ahead(tmp_path, caplog):
    """Only what is missing, once, by several processes; a failing one is logged and costs the others nothing."""
    made = []

    def program(part: list) -> list[str]:
        made.append(part)
        return ["-c", CHILD, json.dumps(part), str(tmp_path)]

    calls = {("deep_gemm", "f", n): n for n in range(5)}
    where = {"lock": tmp_path / "locks" / "lock", "processes": 2, "timeout": 60}
    shown = []
    assert compile_ahead(calls, program, tmp_path, **where, show=shown.append) == 5
    assert [(event.state, event.num_done, event.num_keys) for event in shown] == [
        ("compiled", n, 5) for n in range(1, 6)
    ]
    assert {event.key for event in shown} == {f"deep_gemm/f/{n}" for n in range(5)}
    assert sorted(made) == [[0, 2, 4], [1, 3]] and set(snapshot(tmp_path).values()) == set(calls)
    few = calls | {("deep_gemm", "f", n): n for n in (5, 6)}
    assert compile_ahead(few, program, tmp_path, **where) == 0 and len(made) == 2  # two are compiled in the call
    with caplog.at_level(logging.WARNING):
        more = few | {("deep_gemm", "f", 7): 7, ("deep_gemm", "f", -1): -1}
        assert compile_ahead(more, program, tmp_path, **where) == 3
    assert "a process that compiles DeepGEMM kernels failed: " in caplog.text and "cannot compile" in caplog.text


def test_who_waits_too_long_compiles_nothing_ahead(tmp_path, caplog):
    """Children of the process that has the lock may hang as long as others wait: no reason for those to fail."""
    calls = {("deep_gemm", "f", n): n for n in range(3)}
    where = {"lock": tmp_path / "lock", "processes": 1}

    def program(part: list) -> list[str]:
        return ["-c", CHILD, json.dumps(part), str(tmp_path)]

    with filelock.FileLock(where["lock"]), caplog.at_level(logging.WARNING):
        assert compile_ahead(calls, program, tmp_path, **where, timeout=0.1) == 0
    assert not snapshot(tmp_path)
    (record,) = caplog.records
    assert f"under {where['lock']}, which another process kept for 0.1 s" in record.getMessage()
    for added in (3, 0):  # the lock is free again, and stays so
        assert compile_ahead(calls, program, tmp_path, **where, timeout=60) == added
