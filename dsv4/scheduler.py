"""Continuous batching: which rows of which requests the next step computes, and the pages they live in.

Every step takes one row of each decoding request (more with drafts to verify), then prefill chunks, oldest request
first, within the token budget. Requests are served in order of arrival. When pages run out, unused prefix blocks are
evicted, then the youngest request gives up everything it holds and is recomputed later; the oldest request can
therefore always go on, and every request finishes.

Use: ``add`` requests; then repeat ``plan = schedule()``, run it, and ``commit`` every entry of it. Nothing here
imports torch; a plan holds plain integers, in the terms of docs/ops.md.

Errors: ``ValueError`` for a request that can never run or a wrong commit; other requests are not affected.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from .blocks import BLOCK_TOKENS, PAGE_TOKENS, PagePool, PrefixCache, PrefixNode
from .step_plan import PlanEntry, Request, StepPlan

TakeSnapshot = Callable[[Request, int], object | None]
CopyPage = Callable[[int, int], None]


class Scheduler:
    """See the module's docstring.

    Args:
        token_budget: most rows of a step; at least ``max_requests``, so that decoding never starves a prefill.
        max_requests: requests that run at once, each with a compressor-state slot.
        chunk_tokens: most prefill rows of one request in a step.
        max_length: most tokens of a request, prompt and completion together.
        num_blocks, num_window_pages: sizes of the two pools.
        window: attention window in tokens.
        eos_token_id: token that ends an output unless its request ignores it.
        take_snapshot: called as ``(request, num_tokens)`` when a block of 256 tokens ends at a committed position;
            returns what is needed to resume after ``num_tokens`` tokens, or None if that cannot be had. None instead
            of a function switches prefix reuse off. With it, chunks end on block boundaries where they can.
        copy_page: called as ``(source, target)`` with physical window pages when a reused prefix needs a private copy
            of its last page, because the row at the boundary will be written again (the MTP block's row depends on
            the token after it). None shares the page.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        max_requests: int,
        chunk_tokens: int,
        max_length: int,
        num_blocks: int,
        num_window_pages: int,
        window: int = PAGE_TOKENS,
        eos_token_id: int | None = None,
        take_snapshot: TakeSnapshot | None = None,
        copy_page: CopyPage | None = None,
    ) -> None:
        _at_least("max_requests", max_requests, 1)
        _at_least("token_budget", token_budget, max_requests)
        _at_least("chunk_tokens", chunk_tokens, 1)
        _at_least("max_length", max_length, 2)
        _at_least("num_blocks", num_blocks, 1)
        _at_least("window", window, 1)
        _at_least("num_window_pages", num_window_pages, _pages(window + PAGE_TOKENS))
        if take_snapshot is not None and window > PAGE_TOKENS:
            raise ValueError(f"window must be at most {PAGE_TOKENS} with prefix reuse, got {window}")
        self.token_budget = token_budget
        self.max_requests = max_requests
        self.chunk_tokens = chunk_tokens
        self.max_length = min(max_length, num_blocks * BLOCK_TOKENS)
        self.window = window
        self.eos_token_id = eos_token_id
        self.blocks = PagePool(num_blocks)
        self.window_pages = PagePool(num_window_pages)
        self.prefix = PrefixCache(self.blocks, self.window_pages)
        self.running: list[Request] = []  # in order of arrival, all older than those waiting
        self.waiting: deque[Request] = deque()
        self._take_snapshot = take_snapshot
        self._copy_page = copy_page
        self._state_slots = PagePool(max_requests)
        self._entries: dict[str, PlanEntry] = {}  # planned and not yet committed

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self, request: Request) -> None:
        """Raise what :meth:`add` would raise, and queue nothing.

        Raises:
            ValueError: the request is not new, its id is in use, its prompt is empty, or it can never fit.
        """
        prompt, new = len(request.prompt_ids), request.params.max_new_tokens
        if request.state != "new":
            raise ValueError(f"request {request.id!r} must be new to be added, got a {request.state} one")
        if any(other.id == request.id for other in (*self.running, *self.waiting)):
            raise ValueError(f"request id must be unique among unfinished requests, got {request.id!r}")
        if not prompt:
            raise ValueError(f"request {request.id!r}: prompt must have at least 1 token, got 0")
        check_length(f"request {request.id!r}", prompt, new, self.max_length)

    def add(self, request: Request) -> None:
        """Queue a new request; ``ValueError`` as :meth:`check`."""
        self.check(request)
        request.state, request.token_ids = "waiting", list(request.prompt_ids)
        self.waiting.append(request)

    def propose(self, request: Request, drafts: Sequence[int]) -> None:
        """Set the draft tokens that the next step may verify, as many as fit its budget."""
        if not request.decoding or request.id in self._entries:
            raise ValueError(f"drafts must be for a decoding request between steps, got {request.id!r}")
        request.drafts = tuple(drafts)

    def abort(self, request: Request) -> None:
        """End an unfinished request between steps and free what it holds."""
        if request.state not in ("waiting", "running") or request.id in self._entries:
            raise ValueError(f"a request must be unfinished and between steps to be aborted, got {request.id!r}")
        if request.state == "waiting":
            self.waiting.remove(request)
        self._finish(request, "aborted")

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate its pages. Empty only if there is no work."""
        if self._entries:
            raise ValueError(f"every entry of the last plan must be committed first, got {sorted(self._entries)} left")
        preempted: list[Request] = []
        self._plan_decodes(preempted)
        for request in list(self.running):
            if request.state == "running" and request.id not in self._entries and not request.decoding:
                self._plan_chunk(request, preempted)
        if not preempted:  # what was just taken away must not be handed straight back
            self._admit()
            self._allocate_early()
        assert self._entries or not self.has_work
        return StepPlan(entries=tuple(self._entries.values()), preempted=tuple(preempted))

    def commit(self, request: Request, token: int | None = None, num_accepted: int = 0) -> None:
        """Record the outcome of a request's rows of the last plan.

        Args:
            request: of an entry of the plan.
            token: the token chosen after the last accepted row; None if the entry wanted no logits.
            num_accepted: how many drafts of the entry were right.
        """
        entry = self._entries.get(request.id)
        if entry is None or entry.request is not request:
            raise ValueError(f"a committed request must be in the last plan, got {request.id!r}")
        if (token is None) == bool(entry.logit_offsets):
            rule = "given after rows with logits" if entry.logit_offsets else "None after rows without logits"
            raise ValueError(f"request {request.id!r}: token must be {rule}, got {token}")
        if not 0 <= num_accepted <= entry.num_drafts:
            limit = entry.num_drafts
            raise ValueError(f"request {request.id!r}: num_accepted must be in [0, {limit}], got {num_accepted}")
        del self._entries[request.id]
        first_draft = len(entry.token_ids) - entry.num_drafts
        request.restore, request.drafts = None, ()
        if token is not None:
            self._append(request, (*entry.token_ids[first_draft : first_draft + num_accepted], token))
        request.num_computed = min(entry.start + first_draft + num_accepted, request.num_tokens)
        self._cache_prefix(request)
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)
        else:
            self._leave_window(request)

    # ---- planning ----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, preempted: list[Request]) -> None:
        decoding = [request for request in self.running if request.decoding]
        others = len(decoding) < len(self.running) or bool(self.waiting)
        spare = max(0, self.token_budget - len(decoding) - (self.token_budget // 2 if others else 0))
        for request in decoding:
            if request.state != "running":  # preempted by an older one
                continue
            wanted = min(len(request.drafts), spare, request.params.max_new_tokens - len(request.generated) - 1)
            end = self._reach(request, request.num_tokens + wanted, preempted)
            num_drafts = end - request.num_tokens
            if num_drafts >= 0:
                spare -= num_drafts
                self._plan(request, end, request.drafts[:num_drafts])

    def _plan_chunk(self, request: Request, preempted: list[Request]) -> bool:
        start = request.num_computed
        rows = min(request.num_tokens - start, self.chunk_tokens, self._rows_left)
        end = self._reach(request, start + rows, preempted) if rows else start
        boundary = end // BLOCK_TOKENS * BLOCK_TOKENS
        if self._take_snapshot is not None and boundary > start:
            end = boundary
        if end > start:
            self._plan(request, end, ())
        return end > start

    def _plan(self, request: Request, end: int, drafts: tuple[int, ...]) -> None:
        self._allocate(request, end)
        start = request.num_computed
        token_ids = (*request.token_ids[start:end], *drafts)
        first_wanted = request.num_tokens - 1 - start
        self._entries[request.id] = PlanEntry(
            request=request,
            start=start,
            token_ids=token_ids,
            logit_offsets=tuple(range(first_wanted, len(token_ids))),
            num_drafts=len(drafts),
            restore=request.restore,
        )

    @property
    def _rows_left(self) -> int:
        return self.token_budget - sum(len(entry.token_ids) for entry in self._entries.values())

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_requests and self._rows_left > 0:
            request = self.waiting[0]
            node = self.prefix.match(request.token_ids) if self._take_snapshot is not None else None
            if self._copy_page is not None and not self.window_pages.num_free:
                node = None  # no page for the private copy
            if node is not None:
                self.prefix.acquire(node)
            needed = _blocks(request.num_tokens) - (node.depth if node else 0) + len(self.running)
            if self.running and needed > self.blocks.num_free and needed > self._available_blocks:
                if node is not None:
                    self.prefix.release(node)
                return
            self.waiting.popleft()
            self._start(request, node)
            if not self._plan_chunk(request, []):
                return

    def _start(self, request: Request, node: PrefixNode | None) -> None:
        request.state = "running"
        request.state_slot = self._state_slots.allocate()[0]
        self.running.append(request)
        if node is None:
            return
        assert node.window_page is not None
        request.node, request.restore = node, node.snapshot
        request.block_ids = [self.blocks.share(member.block) for member in node.chain()]
        request.window_page_ids = [-1] * (_pages(node.num_tokens) - 1) + [self._last_page(node.window_page)]
        request.num_computed = node.num_tokens
        if not request.num_preemptions:
            request.cached_tokens = node.num_tokens

    def _last_page(self, page: int) -> int:
        """A reused prefix's last window page: shared, or a private copy."""
        if self._copy_page is None:
            return self.window_pages.share(page)
        private = self.window_pages.allocate(1)[0]
        self._copy_page(page, private)
        return private

    # ---- pages -------------------------------------------------------------------------------------------------------

    @property
    def _available_blocks(self) -> int:
        return self.blocks.num_free + self.prefix.num_evictable

    def _reach(self, request: Request, end: int, preempted: list[Request]) -> int:
        """The position up to which pages can be had, at most ``end``; preempts younger requests for the first row."""
        while True:
            missing_blocks = _blocks(end) - len(request.block_ids)
            missing_pages = _pages(end) - len(request.window_page_ids)
            if missing_blocks <= self.blocks.num_free and missing_pages <= self.window_pages.num_free:
                return end  # the common case, without a walk over the prefix cache
            pages = self.window_pages.num_free + self.prefix.num_reclaimable_window_pages
            possible = min(
                (len(request.block_ids) + self._available_blocks) * BLOCK_TOKENS,
                (len(request.window_page_ids) + pages) * PAGE_TOKENS,
            )
            if possible > request.num_computed:
                return min(end, possible)
            if self.running[-1] is request:
                return request.num_computed
            preempted.append(self.running[-1])
            self._preempt(self.running[-1])

    def _allocate(self, request: Request, end: int) -> None:
        missing = _blocks(end) - len(request.block_ids)
        if missing > self.blocks.num_free:
            self.prefix.evict(missing - self.blocks.num_free)
        request.block_ids += self.blocks.allocate(max(0, missing))
        missing = _pages(end) - len(request.window_page_ids)
        if missing > self.window_pages.num_free:
            self.prefix.reclaim_window_pages(missing - self.window_pages.num_free)
        request.window_page_ids += self.window_pages.allocate(max(0, missing))

    def _allocate_early(self) -> None:
        """Give decoding requests the page of their next row one step before it, so that the step can be launched ahead;
        only from plenty, where nobody could miss the page."""
        for entry in self._entries.values():
            end = entry.start + len(entry.token_ids) + 1
            plenty = min(self.blocks.num_free, self.window_pages.num_free) > 2 * self.max_requests
            if plenty and entry.logit_offsets and not entry.num_drafts and end <= self.max_length:
                self._allocate(entry.request, end)

    def _preempt(self, request: Request) -> None:
        self._entries.pop(request.id, None)
        self._release(request)
        request.state, request.num_computed, request.drafts = "waiting", 0, ()
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave_window(self, request: Request) -> None:
        """Free the window pages wholly before the last ``window`` committed positions."""
        page = max(0, request.num_computed - self.window) // PAGE_TOKENS - 1
        while page >= 0 and request.window_page_ids[page] >= 0:
            self.window_pages.free(request.window_page_ids[page])
            request.window_page_ids[page] = -1
            page -= 1

    def _cache_prefix(self, request: Request) -> None:
        """Put the blocks that the last commit completed into the prefix cache, and hold the last of them."""
        if self._take_snapshot is None:
            return
        for depth in range((request.node.depth if request.node else 0), request.num_computed // BLOCK_TOKENS):
            end = (depth + 1) * BLOCK_TOKENS
            page = request.window_page_ids[end // PAGE_TOKENS - 1]
            snapshot = self._take_snapshot(request, end) if page >= 0 else None
            tokens, block = request.token_ids[end - BLOCK_TOKENS : end], request.block_ids[depth]
            node = self.prefix.insert(request.node, tokens, block, page if page >= 0 else None, snapshot)
            if node.block != block:  # another request computed the same text: keep one copy
                request.block_ids[depth] = self.blocks.share(node.block)
                self.blocks.free(block)
            self.prefix.acquire(node)
            if request.node is not None:
                self.prefix.release(request.node)
            request.node = node

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _append(self, request: Request, tokens: Sequence[int]) -> None:
        params = request.params
        for token in tokens:
            request.generated.append(token)
            request.token_ids.append(token)
            if token in params.stop_token_ids or (token == self.eos_token_id and not params.ignore_eos):
                request.finish_reason = "stop"
            elif len(request.generated) >= params.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                return

    def _finish(self, request: Request, reason: Literal["stop", "length", "aborted"]) -> None:
        if request.state == "running":
            self._release(request)
        request.state, request.finish_reason = "finished", reason

    def _release(self, request: Request) -> None:
        """Give everything back that a running request holds."""
        self.running.remove(request)
        for block in request.block_ids:
            self.blocks.free(block)
        for page in request.window_page_ids:
            if page >= 0:
                self.window_pages.free(page)
        if request.node is not None:
            self.prefix.release(request.node)
        self._state_slots.free(request.state_slot)
        request.block_ids, request.window_page_ids, request.state_slot = [], [], -1
        request.node, request.restore = None, None


def check_length(subject: str, prompt: int, new: int, max_length: int) -> None:
    """Raise ``ValueError`` unless ``prompt`` and ``new`` tokens fit into ``max_length`` together."""
    if prompt + new > max_length:
        raise ValueError(
            f"{subject}: prompt and max_new_tokens must be at most {max_length} tokens together, got {prompt} + {new}"
        )


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
