import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from dsv4.compile import compile_model, inductor, mark_unbacked_sizes
from dsv4.compile.cache import ArtifactCache

from . import toy

REPOSITORY = Path(__file__).resolve().parents[2]
PROCESS = """
import json, sys
spawned = []
sys.addaudithook(lambda event, args: spawned.append([str(a) for a in args[1]]) if event == "subprocess.Popen" else None)
import torch
from pathlib import Path
from dsv4.compile import compile_model, inductor, mark_unbacked_sizes
from tests.compile import toy
def refuse(*_):
    raise AssertionError("compiled a piece")
if sys.argv[2] == "refuse":
    inductor.compile_piece = refuse
model = compile_model(toy.Model(), toy.BOUNDARY, cache_dir=Path(sys.argv[1]), cache_salt=sys.argv[3])
inputs = toy.make_inputs(7, 2, 3)
mark_unbacked_sizes(inputs, toy.SIZES)
out = model(inputs)
later = model(toy.make_inputs(1, 1, 1))
report = model.report
result = {"hits": report.cache_hits, "misses": report.cache_misses, "seconds": vars(report.seconds), "spawned": spawned}
print(json.dumps({**result, "out": out.tolist(), "later": later.tolist()}))
"""


def run_process(cache_dir: Path, compiling: str, salt: str = "process") -> dict:
    command = [sys.executable, "-c", PROCESS, str(cache_dir), compiling, salt]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_here(cache_dir: Path, salt: str):
    compiled = compile_model(toy.Model(), toy.BOUNDARY, cache_dir=cache_dir, cache_salt=salt)
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    return compiled, compiled(inputs)


@pytest.fixture(scope="module")
def filled(cache_dir):
    """What the first process said, whose three pieces are in the cache now."""
    first = run_process(cache_dir, "allow")
    assert (first["hits"], first["misses"]) == (0, 3)
    return first


def test_second_process_loads_every_piece(cache_dir, filled):
    result = run_process(cache_dir, "refuse")
    assert (result["hits"], result["misses"], result["seconds"]["compile"]) == (3, 0, 0.0)
    assert (result["out"], result["later"]) == (filled["out"], filled["later"])
    # Inductor still asks the compiler for its version and preprocesses a header (-E), to name the shared objects.
    built = [command for command in result["spawned"] if "-o" in command and "-E" not in command]
    assert result["spawned"] and not built


@pytest.mark.slow
def test_damaged_entry_is_compiled_again(cache_dir, filled, caplog):
    expected = torch.tensor(filled["out"])
    mine = [p for p in cache_dir.glob("*.json") if json.loads(p.read_text())["identity"]["salt"] == "process"]
    victim = cache_dir / json.loads(mine[0].read_text())["file"]
    victim.write_bytes(victim.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        second, again = run_here(cache_dir, "process")
    assert (second.report.cache_hits, second.report.cache_misses) == (2, 1)
    assert torch.equal(again, expected) and "compiling again" in caplog.text
    third, _ = run_here(cache_dir, "process")
    assert third.report.cache_hits == 3 and not list(cache_dir.glob("*.tmp"))


class TestStore:
    """The store alone, with pickles for artifacts."""

    @pytest.fixture(autouse=True)
    def pickles(self, monkeypatch):
        monkeypatch.setattr(inductor, "save_piece", lambda artifact, path: path.write_bytes(pickle.dumps(artifact)))
        monkeypatch.setattr(inductor, "load_piece", lambda path: pickle.loads(path.read_bytes()))

    def damage(self, directory: Path, change) -> None:
        (manifest,) = directory.glob("*.json")
        (artifact,) = directory.glob("*.artifact")
        change(manifest, artifact)

    @pytest.mark.parametrize(
        "change",
        [
            lambda manifest, artifact: artifact.write_bytes(b"\x80\x05garbage"),
            lambda manifest, artifact: artifact.write_bytes(b""),
            lambda manifest, artifact: artifact.unlink(),
            lambda manifest, artifact: manifest.write_text("{"),
            lambda manifest, artifact: manifest.write_text("[]"),
            lambda manifest, artifact: manifest.write_text(manifest.read_text().replace(torch.__version__, "1.0.0")),
            lambda manifest, artifact: manifest.write_text(manifest.read_text().replace('"key": "', '"key": "0')),
        ],
        ids=["garbage", "empty", "gone", "half a manifest", "other json", "other torch", "other key"],
    )
    def test_unusable_entry_is_replaced(self, tmp_path, caplog, change):
        assert not ArtifactCache(tmp_path, "s").get("key", lambda: "first").loaded
        assert ArtifactCache(tmp_path, "s").get("key", lambda: "unused").call == "first"
        self.damage(tmp_path, change)
        with caplog.at_level(logging.WARNING):
            outcome = ArtifactCache(tmp_path, "s").get("key", lambda: "second")
        assert (outcome.call, outcome.loaded) == ("second", False) and "ignoring cache entry" in caplog.text
        assert ArtifactCache(tmp_path, "s").get("key", lambda: "unused").call == "second"
        assert len(list(tmp_path.glob("*.artifact"))) == len(list(tmp_path.glob("*.json"))) == 1

    def test_salt_and_key_separate_entries(self, tmp_path):
        for salt in ("a", "b"):
            for key in ("x", "y"):
                assert ArtifactCache(tmp_path, salt).get(key, lambda s=salt, k=key: s + k).call == salt + key
        assert ArtifactCache(tmp_path, "b").get("x", lambda: "unused").call == "bx"

    def test_piece_that_cannot_be_saved_still_runs(self, tmp_path, monkeypatch, caplog):
        def fail(artifact, path):
            path.write_bytes(b"half")
            raise RuntimeError("not serializable")

        monkeypatch.setattr(inductor, "save_piece", fail)
        with caplog.at_level(logging.WARNING):
            assert ArtifactCache(tmp_path, "s").get("key", lambda: "built").call == "built"
        assert "is not cached: not serializable" in caplog.text
        assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.tmp"))

    def test_failed_build_releases_the_lock(self, tmp_path):
        with pytest.raises(ZeroDivisionError):
            ArtifactCache(tmp_path, "s").get("key", lambda: 1 / 0)
        assert ArtifactCache(tmp_path, "s").get("key", lambda: "built").call == "built"

    def test_concurrent_users_build_once(self, tmp_path):
        builds: list[int] = []
        outcomes = []

        def build():
            builds.append(1)
            time.sleep(0.1)
            return "built"

        threads = [
            threading.Thread(target=lambda: outcomes.append(ArtifactCache(tmp_path, "s").get("key", build)))
            for _ in range(4)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(builds) == 1 and [o.call for o in outcomes] == ["built"] * 4
        assert sum(o.loaded for o in outcomes) == 3
