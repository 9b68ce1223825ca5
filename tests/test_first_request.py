"""First requests: which engines count, how many are measured, and what the comparison is made of."""

import itertools

import pytest
import torch

from tools.gpu_check import first_request
from tools.gpu_check.common import Record
from tools.gpu_check.place import Place
from tools.gpu_check.points import POINTS
from tools.gpu_check.rules import SampleError

from .gpu_report_samples import samples_of


class FakeServer:
    """An engine in a process that served its ten requests."""

    def __init__(self, path: str, core_s: list[float]) -> None:
        self.purpose, self.core_s, self.killed = ("serve", path), core_s, False
        self.process = self
        self.ready = self.told = False

    def wait_ready(self) -> None:
        self.ready = True

    def go(self) -> None:
        self.told = True

    def result(self) -> dict:
        return {"awake_s": 0.5, "request_s": [9.0, *[1.0] * 9], "core_s": self.core_s}

    def kill(self) -> None:
        self.killed = True


STEADY, CHANGED = [1e-3] * 11, [1e-3, *[2e-3] * 10]


def test_first_requests_are_compared_within_their_process():
    samples = samples_of("first_request")
    assert POINTS["first_request"].judge(samples) == (1.1, True)
    for number in range(2):
        assert POINTS["first_request"].judge(samples)[1]  # the median of three
        samples["piecewise"]["request_s"][number][0] = 2.6
    assert POINTS["first_request"].judge(samples) == (1.3, False)
    samples["piecewise"]["request_s"][0] = [2.2]
    with pytest.raises(SampleError, match="piecewise must hold ten requests of each engine"):
        POINTS["first_request"].judge(samples)
    samples = samples_of("first_request")
    samples["full"]["awake_s"][2] = 0.0
    with pytest.raises(SampleError, match="must be kept busy for 0.4 s"):
        POINTS["first_request"].judge(samples)
    samples["full"] = {name: values[:2] for name, values in samples["full"].items()}
    with pytest.raises(SampleError, match="must be at least 3, got 2"):
        POINTS["first_request"].judge(samples)


@pytest.mark.parametrize("place", [0, 1, 9, 10])
def test_first_requests_count_where_the_core_kept_its_speed(place):
    """Before and after the first and the tenth; neither a slow first request nor a fast one decides about it."""
    samples = samples_of("first_request")
    samples["eager"]["core_s"][1][place] = 0.8e-3
    with pytest.raises(SampleError, match="engines of eager whose core kept its speed must be 3, got 2"):
        POINTS["first_request"].judge(samples)
    for name, value in (("awake_s", 0.5), ("request_s", [3.0, *[2.0] * 9]), ("core_s", [1e-3] * 11)):
        samples["eager"][name] += [value, value]
    assert POINTS["first_request"].judge(samples) == (1.3, False)  # 1.1, 1.1, 1.5, 1.5
    samples["eager"]["core_s"][1][place] = 1e-3
    assert POINTS["first_request"].judge(samples) == (1.1, True)
    for core in samples["eager"]["core_s"]:
        core[2:9] = [5e-3] * 7  # between them it may do what it likes
    assert POINTS["first_request"].judge(samples) == (1.1, True)


def test_what_a_first_request_leaves_running_is_no_excuse():
    """A loop that is slower after it, and only there, in more than a quarter of a path's engines."""
    samples = samples_of("first_request")
    for name, value in (("awake_s", 0.5), ("request_s", [6.0, *[2.0] * 9]), ("core_s", [1e-3, 1.2e-3, *[1e-3] * 9])):
        samples["eager"][name].append(value)
    assert POINTS["first_request"].judge(samples) == (1.1, True)  # one of four
    samples["eager"]["core_s"][1][1] = 1.2e-3
    with pytest.raises(SampleError, match="engines of eager .* must be at most a quarter, got 2 of 4: the request may"):
        POINTS["first_request"].judge(samples)
    for core in samples["eager"]["core_s"]:
        core[-1] = 1.2e-3  # the host then, since it comes back
    with pytest.raises(SampleError, match="whose core kept its speed must be 3, got 0"):
        POINTS["first_request"].judge(samples)


def test_paths_that_lack_engines_get_more(monkeypatch, tmp_path):
    """At most three times, whatever their requests took, and no other path does."""
    waves = []

    def servers(place, paths):
        waves.append([FakeServer(path, CHANGED if len(waves) < 2 else STEADY) for path in paths])
        return waves[-1]

    monkeypatch.setattr(first_request, "servers", servers)
    prepared = [FakeServer(path, STEADY) for path in first_request.PATHS for _ in range(3)]
    prepared[3].core_s = CHANGED
    record = Record(tmp_path / "record.json")
    first_request.first_request(Place(), record, prepared)
    assert [[server.purpose[1] for server in wave] for wave in waves] == [["full"], ["full"], ["full"]]
    assert all(server.ready and server.told for wave in waves for server in wave) and not record.errors
    counts = {path: len(found["core_s"]) for path, found in record.samples["first_request"].items()}
    assert counts == {"eager": 3, "full": 6, "piecewise": 3, "full.drafting": 3}
    assert POINTS["first_request"].judge(record.samples["first_request"]) == (9.0, False)


def test_a_server_that_ends_too_early_is_recorded_and_no_other_is_left(monkeypatch, tmp_path):
    def gone(server):
        raise RuntimeError("serve eager must print 'result ', got its end, 1")

    class Gone(FakeServer):
        result = gone

    prepared = [Gone(path, STEADY) for path in first_request.PATHS]
    more = []
    monkeypatch.setattr(
        first_request, "servers", lambda place, paths: more.append([Gone(path, STEADY) for path in paths]) or more[-1]
    )
    record = Record(tmp_path / "record.json")
    first_request.first_request(Place(), record, prepared)
    assert len(more) == first_request.WAVES - 1 and "got its end" in record.errors["first_request"]


def test_a_core_is_waited_for_until_it_keeps_one_speed(monkeypatch):
    place, x = Place(dry=True), torch.zeros(1, 1)
    speeds = iter([1e-3, 2e-3] * 20 + [2e-3] * 1000)
    monkeypatch.setattr(first_request, "core_seconds", lambda: next(speeds))
    taken = first_request.stay_awake(place, x)
    assert first_request.AWAKE_S <= 0.8 < taken < first_request.STEADY_S  # 40 turns of 20 ms, then five alike
    monkeypatch.setattr(first_request, "core_seconds", itertools.cycle([1e-3, 2e-3]).__next__)
    monkeypatch.setattr(first_request, "STEADY_S", 0.7)
    assert 0.7 <= first_request.stay_awake(place, x) < 2
