"""Progress of the prewarm on stderr: a bar on a terminal, else one line per key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)


class KeyProgress(Protocol):
    """What is shown of one change of one key; see ``dsv4.graphs.warmer.PrewarmProgress``."""

    @property
    def key(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def num_done(self) -> int: ...

    @property
    def num_keys(self) -> int: ...

    @property
    def seconds(self) -> float: ...


@contextmanager
def prewarm_progress(console: Console | None = None) -> Iterator[Callable[[KeyProgress], None]]:
    """The yielded function shows one change; a key is shown when it starts, because it may take long."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: _line(console, event)
        return
    columns = (
        TextColumn("prewarm"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(event: KeyProgress) -> None:
            text = f"{event.key} (another process compiles it)" if event.state == "waiting" else event.key
            bar.update(task, completed=event.num_done, total=event.num_keys, description=text)

        yield show


def _line(console: Console, event: KeyProgress) -> None:
    took = f" {event.seconds:.1f} s" if event.state == "done" else ""
    text = f"prewarm {event.num_done}/{event.num_keys} {event.state} {event.key}{took}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
