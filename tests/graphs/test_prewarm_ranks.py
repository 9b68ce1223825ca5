"""The prewarm of several processes: agreement of the ranks, and one compilation per kernel and machine."""

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsv4.graphs.ranks import Ranks

from .rank_programs import (
    FakeKernels,
    decisions,
    one_rank_anew,
    run_ranks,
    same_triton_key,
    shared_keys,
    shared_parts,
    skewed_compile,
    switched_off,
)

# --- ranks ----------------------------------------------------------------------------------------------------------


def test_missing_ranks_are_named():
    store = dist.HashStore()
    ranks = Ranks(0, 3, store, timedelta(seconds=0.2))
    other = threading.Thread(target=_ignoring_timeout, args=(Ranks(1, 3, store, timedelta(seconds=0.1)),))
    other.start()
    with pytest.raises(TimeoutError, match=r"every rank must reach 'warm' within 0 s, got none from ranks \[2\]"):
        ranks.exchange("warm", 0)
    other.join()


def test_a_rank_that_failed_says_why_even_if_nobody_comes(caplog):
    """Not that the others are late, of which its failure may be the cause."""
    ranks = Ranks(0, 2, dist.HashStore(), timedelta(seconds=0.1))
    with pytest.raises(ValueError, match="shard 2 must be whole") as error, ranks.together("loaded"):
        raise ValueError("shard 2 must be whole")
    assert isinstance(error.value.__cause__, TimeoutError) and "rank 0 failed at 'loaded'" in caplog.text


def _ignoring_timeout(ranks: Ranks) -> None:
    with pytest.raises(TimeoutError):
        ranks.exchange("warm", 1)


def test_exchange_returns_all_values_by_rank():
    store, found = dist.HashStore(), {}

    def rank(number: int) -> None:
        for turn in range(3):  # rounds do not read each other's values
            ranks = Ranks(number, 3, store, timedelta(seconds=20))
            found[number, turn] = (ranks.exchange("a", [number, turn]), ranks.exchange("b", {"rank": number}))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    for (_, turn), (first, second) in found.items():
        assert first == [[0, turn], [1, turn], [2, turn]] and second == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_refused_ranks():
    with pytest.raises(ValueError, match="store must be given for a group of several ranks, got none for 2 ranks"):
        Ranks(0, 2, None, timedelta(seconds=1))
    with pytest.raises(ValueError, match="group must contain this process, got rank -1 of 2"):
        Ranks(-1, 2, dist.HashStore(), timedelta(seconds=1))


# --- processes ------------------------------------------------------------------------------------------------------


def test_skewed_compile(tmp_path):
    """One rank compiles longer than a collective may take: no rank enters a collective before all are warm."""
    limit = 2.0
    found = run_ranks(skewed_compile, 4, tmp_path, 2, limit)
    assert [f["total"] for f in found] == [6.0] * 4
    assert all(len(f["log"]) == 1 for f in found)
    last_warm = max(f["warm"] for f in found)
    assert found[2]["warm"] == last_warm and min(f["entered"] for f in found) >= last_warm
    assert all(f["wait_seconds"] > limit for rank, f in enumerate(found) if rank != 2)
    assert {f["rank_seconds"] for f in found} == {found[0]["rank_seconds"]}
    assert found[0]["rank_seconds"].index(max(found[0]["rank_seconds"])) == 2
    # Without the prewarm the same skew does break the collective.
    assert "RuntimeError" in {f["unguarded"] for f in found}


def test_ranks_that_decide_differently(tmp_path):
    found = run_ranks(decisions, 3, tmp_path)
    same = {name: {f[name] for f in found} for name in found[0] if isinstance(found[0][name], str)}
    head = "PrewarmError: every rank must prewarm the same as rank 0, got "
    assert same.pop("settings") == {head + "rank 2: settings.max_seq_len is 8192, not 4096"}
    assert same.pop("keys") == {head + "rank 1: adds keys c/3"}
    text = "lacks keys k/0, k/1, k/2, k/3, k/4 and 4 more; rank {0}: adds keys a/1, b/2"
    assert same.pop("many keys") == {head + "; ".join(f"rank {r}: {text.format(r)}" for r in (1, 2))}
    assert same.pop("none here") == {head + "rank 1: lacks keys a/1, b/2"}
    zero = "ValueError: prewarm must have at least 1 case, got 0: no op recognised the model, so nothing is warm"
    assert same.pop("none") == {zero}
    assert same.pop("switch") == {head + "rank 1: enabled is false, not true"}
    off = "rank 1: settings.seed is 1, not 0; rank 2: settings.seed is 1, not 0"
    assert same.pop("switch off") == {head + off}
    assert same.pop("bad argument") == {
        "ValueError: workers must be at least 1, got 0",
        "PrewarmError: every rank must be able to prewarm, got on rank 2: "
        "ValueError: workers must be at least 1, got 0",
    }
    assert same.pop("no cases") == {
        "ValueError: a library must be installed, got none",
        "PrewarmError: every rank must be able to prewarm, got on rank 1: "
        "ValueError: a library must be installed, got none",
    }
    assert all(f["ran before agreement"] == [] for f in found)
    own = "prewarm of b/2 must succeed, got RuntimeError: no such instruction"
    assert found[1]["failure"] == f"PrewarmError: {own}"
    assert found[0]["failure"] == found[2]["failure"] == f"PrewarmError: every rank must be warm, got rank 1: {own}"
    same.pop("failure")
    late = {"TimeoutError: lock must be free", "PrewarmError: every rank must be warm, got rank 2: lock must be free"}
    assert same.pop("ahead") == late
    own, others = sorted(same.pop("no folder"))
    assert own.startswith("NotADirectoryError: ") and "every rank must be warm, got rank 2: [Errno 20]" in others
    assert same == {"all well": {"passed"}}
    assert all(f["run"] == f["run again"] == [("a", 1), ("b", 2)] and f["repeated"] for f in found)


def test_the_switch_keeps_the_meeting(tmp_path):
    found = run_ranks(switched_off, 2, tmp_path)
    assert found[0]["left"] >= found[1]["entered"] > found[0]["entered"] + 0.3
    assert all(f["run"] == [] and f["report"]["seconds"] == {} for f in found)
    assert found[0]["report"]["decision"] == found[1]["report"]["decision"]
    assert all(f["report"]["rank_seconds"] == [0.0, 0.0] for f in found)  # exchanged at the end


def test_a_repeated_call_waits_for_a_rank_that_is_not_warm(tmp_path):
    found = run_ranks(one_rank_anew, 2, tmp_path)
    assert [f["repeated"] for f in found] == [True, False]
    assert found[0]["wait"] > 0.5
    assert all(f["rank_seconds"][1] > 0.7 for f in found)


def test_one_compilation_per_key_and_machine(tmp_path):
    """Four processes, one cold Triton key, at the same moment: one compiles, three load, all get the same binary."""
    found = run_ranks(same_triton_key, 4, tmp_path)
    assert Counter(f["counts"] for f in found) == {(1, 0): 1, (0, 1): 3}
    key = ("scale_rows", 64)
    assert {f["binaries"][key] for f in found} == {found[0]["binaries"][key]} and len(found[0]["binaries"][key]) > 100
    assert all(f["warm"] == {key} for f in found)


def test_processes_share_the_compilations(tmp_path):
    found = run_ranks(shared_keys, 3, tmp_path, 6)
    log = FakeKernels(tmp_path / "kernels").log
    assert sorted(line.split(")")[0] for line in log) == [f"('k', {n}" for n in range(6)]  # each key once
    assert len({line.split()[-2] for line in log}) > 1  # no process compiled them all
    assert all(sorted(f["run"]) == [("k", n) for n in range(6)] for f in found)  # but each ran them all


def test_processes_share_kernels_that_several_cases_launch(tmp_path):
    """The first cases of all processes need the same kernel at the same moment, under locks of different cases."""
    found = run_ranks(shared_parts, 3, tmp_path, 6)
    log = FakeKernels(tmp_path / "kernels").log
    keys = [*(f"('k', {n}" for n in range(6)), "('part', 0"]
    assert sorted(line.split(")")[0] for line in log) == keys  # each once, or one would have read half a binary
    assert all(set(f["run"]) == {("part", 0), *(("k", n) for n in range(6))} for f in found)
    assert max(f["lock_seconds"] for f in found) > 0.2
