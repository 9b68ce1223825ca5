"""A simulated engine for scheduler tests: its caches record what every row wrote, its rows check what they read."""

import random
from collections import Counter
from types import SimpleNamespace

from dsv4.blocks import BLOCK_TOKENS, PAGE_TOKENS
from dsv4.scheduler import Scheduler
from dsv4.step_plan import PlanEntry, Request, StepPlan

EOS, VOCABULARY, RING, TAIL = 0, 50, 16, 4


def params(max_new_tokens=8, stop_token_ids=(), ignore_eos=False):
    return SimpleNamespace(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)


def prefix_keys(tokens):
    """keys[p] identifies the text up to and including position p."""
    keys, key = [], 0
    for token in tokens:
        key = hash((key, token))
        keys.append(key)
    return keys


def next_token(tokens) -> int:
    return random.Random(hash(tuple(tokens))).randrange(VOCABULARY)


def expected_output(prompt, request_params) -> list[int]:
    tokens, output = list(prompt), []
    stops = {*request_params.stop_token_ids, *(() if request_params.ignore_eos else (EOS,))}
    while len(output) < request_params.max_new_tokens and not (output and output[-1] in stops):
        output.append(next_token(tokens))
        tokens.append(output[-1])
    return output


class Engine:
    """Runs plans on shadow caches: rows and state hold the key of the text they belong to."""

    def __init__(self, *, prefix_reuse=True, private_page=False, num_drafts=0, seed=0, **config):
        defaults = {"token_budget": 64, "max_requests": 4, "chunk_tokens": 64, "max_length": 4096}
        pools = {"num_blocks": 64, "num_window_pages": 64, "eos_token_id": EOS}
        take_snapshot = self.take_snapshot if prefix_reuse else None
        copy_page = self.copy_page if private_page else None
        self.scheduler = Scheduler(**(defaults | pools | config), take_snapshot=take_snapshot, copy_page=copy_page)
        self.num_drafts, self.random = num_drafts, random.Random(seed)
        self.window_rows, self.entry_rows, self.state = {}, {}, {}
        self.plans: list[StepPlan] = []

    def take_snapshot(self, request, num_tokens):
        if request.num_computed - num_tokens > RING - TAIL:
            return None
        return {p: self.state[request.state_slot, p % RING] for p in range(num_tokens - TAIL, num_tokens)}

    def copy_page(self, source, target):
        assert self.scheduler.window_pages.references(target) == 1 and source != target
        for offset in range(PAGE_TOKENS):
            self.window_rows[target, offset] = self.window_rows[source, offset]

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.check_plan(plan)
        keys = {e.request.id: prefix_keys([*e.request.token_ids[: e.start], *e.token_ids]) for e in plan.entries}
        for entry in plan.entries:
            self.write(entry, keys[entry.request.id])
        for entry in plan.entries:
            self.read(entry, keys[entry.request.id])
        for entry in self.random.sample(plan.entries, len(plan.entries)):
            self.commit(entry)
        self.check_pages()
        return plan

    def run(self, limit=5000):
        while self.scheduler.has_work:
            self.step()
            assert len(self.plans) < limit

    def write(self, entry: PlanEntry, keys) -> None:
        request = entry.request
        for position, key in (entry.restore or {}).items():
            self.state[request.state_slot, position % RING] = key
        for position in range(entry.start, entry.start + len(entry.token_ids)):
            for back in range(1, min(TAIL, position) + 1):
                assert self.state[request.state_slot, (position - back) % RING] == keys[position - back]
            self.state[request.state_slot, position % RING] = keys[position]
            page = request.window_page_ids[position // PAGE_TOKENS]
            assert page >= 0
            self.window_rows[page, position % PAGE_TOKENS] = keys[position]
            self.entry_rows[request.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = keys[position]

    def read(self, entry: PlanEntry, keys) -> None:
        request, last = entry.request, entry.start + len(entry.token_ids) - 1
        for position in {entry.start, last}:
            for seen in range(max(0, position - self.scheduler.window + 1), position + 1):
                page = request.window_page_ids[seen // PAGE_TOKENS]
                assert self.window_rows[page, seen % PAGE_TOKENS] == keys[seen]
        for seen in range(last + 1):
            assert self.entry_rows[request.block_ids[seen // BLOCK_TOKENS], seen % BLOCK_TOKENS] == keys[seen]

    def commit(self, entry: PlanEntry) -> None:
        request = entry.request
        if not entry.logit_offsets:
            self.scheduler.commit(request)
            return
        text, accepted = list(request.token_ids), 0
        for draft in entry.token_ids[len(entry.token_ids) - entry.num_drafts :]:
            if draft != next_token(text):
                break
            text.append(draft)
            accepted += 1
        self.scheduler.commit(request, next_token(text), accepted)
        if request.decoding and self.num_drafts:
            self.scheduler.propose(request, self.guess(request.token_ids))

    def guess(self, tokens):
        text = list(tokens)
        for _ in range(self.num_drafts):
            right = self.random.random() < 0.7
            text.append(next_token(text) if right else self.random.randrange(VOCABULARY))
        return text[len(tokens) :]

    def check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        assert plan.num_rows <= scheduler.token_budget and len(plan.entries) <= scheduler.max_requests
        assert scheduler.running and plan.entries
        assert scheduler.running[0] in [entry.request for entry in plan.entries]  # the oldest always goes on
        assert len({request.state_slot for request in scheduler.running}) == len(scheduler.running)
        for entry in plan.entries:
            request, end = entry.request, entry.start + len(entry.token_ids)
            assert entry.start == request.num_computed  # positions are contiguous
            own = entry.token_ids[: len(entry.token_ids) - entry.num_drafts]
            assert 1 <= len(own) <= scheduler.chunk_tokens
            assert list(own) == request.token_ids[entry.start : entry.start + len(own)]
            wanted = end - entry.start - entry.num_drafts - 1
            reaches_end = entry.start + len(own) == request.num_tokens
            assert entry.logit_offsets == (tuple(range(wanted, len(entry.token_ids))) if reaches_end else ())
            assert entry.num_drafts == 0 or reaches_end
            for index in range(entry.start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
                assert scheduler.window_pages.references(request.window_page_ids[index]) == 1  # nobody else's page
            for index in range(entry.start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
                assert scheduler.blocks.references(request.block_ids[index]) == 1

    def check_pages(self) -> None:
        scheduler, nodes = self.scheduler, self.scheduler.prefix.nodes()
        blocks, pages = Counter(node.block for node in nodes), Counter(node.window_page for node in nodes)
        for request in scheduler.running:
            blocks.update(request.block_ids)
            pages.update(request.window_page_ids)
            needed = max(0, request.num_computed - scheduler.window) // PAGE_TOKENS
            assert all((page >= 0) == (index >= needed) for index, page in enumerate(request.window_page_ids))
        for pool, owned in ((scheduler.blocks, blocks), (scheduler.window_pages, pages)):
            assert all(pool.references(page) == owned[page] for page in range(pool.num_pages))
        assert sum(node.references for node in nodes) == sum(r.node is not None for r in scheduler.running)
        idle = [r for r in scheduler.waiting if r.block_ids or r.window_page_ids or r.state_slot >= 0 or r.num_computed]
        assert not idle


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [1 + random.Random(seed * 10_000 + index).randrange(VOCABULARY - 1) for index in range(length)]


def request_of(name: str, prompt, **keys) -> Request:
    return Request(id=name, prompt_ids=prompt, params=params(**keys))
