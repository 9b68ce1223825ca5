"""Compiled artifacts on disk, shared by processes.

An entry is an artifact file and a manifest that names it, its size and its SHA-256; the manifest is written last and
replaced atomically, so a reader sees a whole entry or none. A lock file per key makes concurrent processes compile a
key once: the others wait and load. An entry that is damaged, or was made by another torch, machine or salt, is
reported in the log, compiled again and replaced.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from . import inductor
from .dedupe import key_hash

logger = logging.getLogger(__name__)


def require_usable(directory: Path) -> None:
    """Make ``directory`` if it is missing and write a file there; ``ValueError`` if either fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _temporary(directory) as path:
            path.write_bytes(b"")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"compile_cache must be a directory to write to, got {directory}: {reason}") from error


@dataclass(frozen=True)
class Outcome:
    """One compiled piece and where it came from."""

    call: Callable[..., Any]
    loaded: bool


class ArtifactCache:
    """Artifacts by structural key.

    Args:
        directory: created if missing; ``ValueError`` if it cannot be written to.
        salt: the caller's hash of everything else an artifact depends on, such as op schemas and sources.
    """

    def __init__(self, directory: Path, salt: str) -> None:
        self.directory = directory
        self._identity = {"torch": "|".join(inductor.environment_key()), "salt": salt}
        require_usable(directory)

    @property
    def inductor_directory(self) -> Path:
        return self.directory / "inductor"

    def get(self, key: str, build: Callable[[], Any]) -> Outcome:
        """The artifact of ``key``: loaded if there is a valid entry, else built and stored."""
        name = key_hash(key, *self._identity.values())
        with filelock.FileLock(self.directory / f"{name}.lock"):
            call = self._load(name, key)
            if call is not None:
                return Outcome(call, loaded=True)
            artifact = build()
            self._store(name, key, artifact)
            return Outcome(artifact, loaded=False)

    def _load(self, name: str, key: str) -> Callable[..., Any] | None:
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_text())
            if manifest["identity"] != self._identity or manifest["key"] != key_hash(key):
                raise ValueError(f"entry must belong to {self._identity}, got {manifest['identity']}")
            artifact = self.directory / Path(manifest["file"]).name
            digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
            if digest != manifest["sha256"]:
                raise ValueError(f"artifact must have SHA-256 {manifest['sha256']}, got {digest}")
            return inductor.load_piece(artifact)
        except Exception as error:  # unpickling foreign bytes can raise anything; the entry is made again
            logger.warning("ignoring cache entry %s and compiling again: %s: %s", path, type(error).__name__, error)
            return None

    def _store(self, name: str, key: str, artifact: Any) -> None:
        try:
            with _temporary(self.directory) as path:
                inductor.save_piece(artifact, path)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                file = f"{name}.{digest[:16]}.artifact"
                os.replace(path, self.directory / file)
        except RuntimeError as error:  # torch's word for a graph that it cannot serialise
            logger.warning("piece %s runs but is not cached: %s", name, error)
            return
        manifest = {"key": key_hash(key), "identity": self._identity, "file": file, "sha256": digest}
        with _temporary(self.directory) as path:
            path.write_text(json.dumps(manifest, indent=1))
            os.replace(path, self.directory / f"{name}.json")
        for old in self.directory.glob(f"{name}.*.artifact"):
            if old.name != file:
                old.unlink()


@contextmanager
def _temporary(directory: Path) -> Iterator[Path]:
    path = directory / f"{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def load_or_build(
    keys: Sequence[str], builders: Sequence[Callable[[], Any]], cache: ArtifactCache | None
) -> list[Outcome]:
    """One outcome per key, with Inductor's own files kept inside the cache directory."""
    with inductor.inductor_cache(cache.inductor_directory if cache else None):
        if cache is None:
            return [Outcome(build(), loaded=False) for build in builders]
        return [cache.get(key, build) for key, build in zip(keys, builders, strict=True)]
