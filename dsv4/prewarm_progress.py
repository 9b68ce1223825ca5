"""Progress of the prewarm and of the capture on stderr: a bar on a terminal, else one line per item."""

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


class ItemProgress(Protocol):
    """What is shown of one change of one item: a key (``dsv4.graphs.warmer.PrewarmProgress``) or a bucket."""

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


Show = Callable[[ItemProgress], None]


@contextmanager
def stage_progress(stage: str, console: Console | None = None, *, enabled: bool = True) -> Iterator[Show]:
    """The yielded function shows one change, unless that is not ``enabled``.

    An item is shown when it starts, because it may take long.
    """
    console = console or Console(stderr=True)
    if not enabled:
        yield lambda event: None
        return
    if not console.is_terminal:
        yield lambda event: _line(stage, console, event)
        return
    columns = (
        TextColumn(stage),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(event: ItemProgress) -> None:
            text = f"{event.key} (another process compiles it)" if event.state == "waiting" else event.key
            bar.update(task, completed=event.num_done, total=event.num_keys, description=text)

        yield show


def _line(stage: str, console: Console, event: ItemProgress) -> None:
    took = f" {event.seconds:.1f} s" if event.state == "done" else ""
    text = f"{stage} {event.num_done}/{event.num_keys} {event.state} {event.key}{took}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
