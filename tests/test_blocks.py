from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from dsv4.blocks import BLOCK_TOKENS, PAGE_TOKENS, OutOfPages, PagePool, PrefixCache, PrefixNode
from dsv4.ops import shapes


def block_of(value: int) -> list[int]:
    return [value] * BLOCK_TOKENS


def new_cache(pages: int = 16) -> tuple[PagePool, PagePool, PrefixCache]:
    blocks, windows = PagePool(pages), PagePool(pages)
    return blocks, windows, PrefixCache(blocks, windows)


def grow(blocks, windows, cache, values, resumable) -> list[PrefixNode]:
    """Insert a chain and drop the request's own references, as a finished request does."""
    nodes, parent = [], None
    for value, resume in zip(values, resumable, strict=True):
        (block,), (page,) = blocks.allocate(1), windows.allocate(1)
        parent = cache.insert(parent, block_of(value), block, page if resume else None, ("snapshot", value))
        blocks.free(block)
        windows.free(page)
        nodes.append(parent)
    return nodes


def test_page_sizes_are_those_of_the_ops():
    assert (BLOCK_TOKENS, PAGE_TOKENS) == (shapes.BLOCK_TOKENS, shapes.WINDOW_PAGE_TOKENS)


def test_pool_counts_owners():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    assert first != second and pool.num_free == 1
    pool.share(first)
    pool.free(first)
    assert pool.references(first) == 1 and pool.num_free == 1
    pool.free(first)
    assert pool.references(first) == 0 and pool.num_free == 2
    assert pool.allocate(0) == []


def test_pool_errors():
    pool = PagePool(2)
    (page,) = pool.allocate()
    with pytest.raises(OutOfPages, match="count must be at most the 1 free of 2 pages, got 2"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.free(page)
    with pytest.raises(ValueError, match=f"a page must be allocated to be freed, got free page {page}"):
        pool.free(page)
    with pytest.raises(ValueError, match=f"a page must be allocated to be shared, got free page {page}"):
        pool.share(page)
    with pytest.raises(ValueError, match=r"page must be in \[0, 2\), got -1"):
        pool.free(-1)
    with pytest.raises(ValueError, match="num_pages must be at least 0, got -1"):
        PagePool(-1)
    with pytest.raises(ValueError, match="count must be at least 0, got -2"):
        pool.allocate(-2)


def test_match_leaves_one_token():
    blocks, windows, cache = new_cache()
    nodes = grow(blocks, windows, cache, [1, 2], [True, True])
    text = block_of(1) + block_of(2)
    assert cache.match(text) is nodes[0]
    assert cache.match(text + [9]) is nodes[1]
    assert cache.match(text[:257]) is nodes[0]
    assert cache.match(text[:256]) is None
    assert cache.match([]) is None
    assert nodes[1].num_tokens == 512 and nodes[1].chain() == nodes


def test_match_stops_at_the_last_resumable_node():
    blocks, windows, cache = new_cache()
    nodes = grow(blocks, windows, cache, [1, 2, 3, 4], [False, True, False, True])
    text = [token for value in (1, 2, 3, 9) for token in block_of(value)]
    assert cache.match(text + [0]) is nodes[1]
    assert cache.match(block_of(1) + [0]) is None


def test_a_block_matches_only_behind_its_own_prefix():
    blocks, windows, cache = new_cache()
    grow(blocks, windows, cache, [1, 2], [True, True])
    assert cache.match(block_of(2) + [0]) is None
    assert cache.match(block_of(3) + block_of(2) + [0]) is None


def test_insert_completes_an_existing_node():
    blocks, windows, cache = new_cache()
    (node,) = grow(blocks, windows, cache, [1], [False])
    assert not node.resumable and windows.num_free == 16
    (again,) = grow(blocks, windows, cache, [1], [True])
    assert again is node and node.resumable
    assert (blocks.num_free, windows.num_free, len(cache)) == (15, 15, 1)


def test_eviction_order():
    blocks, windows, cache = new_cache()
    old = grow(blocks, windows, cache, [1, 2], [True, True])
    young = grow(blocks, windows, cache, [1, 3], [True, True])
    cache.acquire(old[1])
    cache.release(old[1])  # used more recently than young[1] now
    assert cache.evict(1) == 1
    assert cache.match(block_of(1) + block_of(3) + [0]) is old[0]
    cache.acquire(old[1])
    assert cache.num_evictable == 0 and cache.evict(5) == 0
    cache.release(old[1])
    assert cache.num_evictable == 2 and cache.evict(5) == 2
    assert (len(cache), blocks.num_free, windows.num_free) == (0, 16, 16)
    with pytest.raises(ValueError, match="a prefix node must be in the cache, got an evicted one of depth 2"):
        cache.acquire(young[1])


def test_window_pages_can_be_reclaimed_from_a_held_chain():
    blocks, windows, cache = new_cache()
    nodes = grow(blocks, windows, cache, [1, 2, 3], [True, True, True])
    cache.acquire(nodes[2])
    windows.share(nodes[0].window_page)  # a request reads this page
    assert cache.num_reclaimable_window_pages == 2
    assert cache.reclaim_window_pages(0) == 0
    assert cache.reclaim_window_pages(5) == 2
    assert [node.resumable for node in nodes] == [True, False, False] and len(cache) == 3
    assert windows.num_free == 15


def test_use_of_a_chain_counts_for_all_of_it():
    blocks, windows, cache = new_cache()
    chain = grow(blocks, windows, cache, [1, 2], [True, True])
    (other,) = grow(blocks, windows, cache, [3], [True])
    cache.release(cache.acquire(chain[1]))
    assert cache.reclaim_window_pages(1) == 1
    assert [node.resumable for node in (*chain, other)] == [True, True, False]


def test_cache_errors():
    blocks, windows, cache = new_cache()
    (node,) = grow(blocks, windows, cache, [1], [True])
    with pytest.raises(ValueError, match="a prefix block must have 256 tokens, got 3"):
        cache.insert(None, [1, 2, 3], 0)
    with pytest.raises(ValueError, match="must be held to be released, got depth 1 with 0 references"):
        cache.release(node)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests insert, hold and drop chains while the cache evicts; a plain model predicts every reference count."""

    chains = Bundle("chains")  # nodes held by a request

    def __init__(self):
        super().__init__()
        self.blocks, self.windows, self.cache = new_cache(8)
        self.holds: Counter[bytes] = Counter()

    @rule(target=chains, value=st.integers(0, 2), resumable=st.booleans())
    def start(self, value, resumable):
        return self._insert(None, value, resumable)

    @rule(target=chains, parent=chains, value=st.integers(0, 2), resumable=st.booleans())
    def extend(self, parent, value, resumable):
        return self._insert(parent, value, resumable)

    def _insert(self, parent, value, resumable):
        for pool, reclaim in ((self.blocks, self.cache.evict), (self.windows, self.cache.reclaim_window_pages)):
            if not pool.num_free and not reclaim(1):
                return multiple()
        block, page = self.blocks.allocate()[0], self.windows.allocate()[0]
        node = self.cache.insert(parent, block_of(value), block, page if resumable else None, object())
        self.blocks.free(block)
        self.windows.free(page)
        self.holds[self.cache.acquire(node).digest] += 1
        return node

    @rule(node=consumes(chains))
    def let_go(self, node):
        self.cache.release(node)
        self.holds[node.digest] -= 1

    @rule(target=chains, values=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def resume(self, values):
        tokens = [token for value in values for token in block_of(value)]
        node = self.cache.match(tokens + [7])
        if node is None:
            return multiple()
        assert node.resumable and node.num_tokens <= len(tokens)
        self.holds[self.cache.acquire(node).digest] += 1
        return node

    @precondition(lambda self: len(self.cache))
    @rule(count=st.integers(1, 3))
    def evict(self, count):
        before, expected = set(self.cache.nodes()), self.cache.num_evictable
        protected = {member for node in before if node.references for member in node.chain()}
        clocks = {node: node.clock for node in before if not node.references and not node.children}
        assert self.cache.evict(count) == min(count, expected)
        gone = before - set(self.cache.nodes())
        assert not gone & protected
        if count == 1 and gone:
            assert clocks[gone.pop()] == min(clocks.values())

    @rule(count=st.integers(0, 3))
    def reclaim(self, count):
        expected = min(count, self.cache.num_reclaimable_window_pages)
        free = self.windows.num_free
        assert self.cache.reclaim_window_pages(count) == expected
        assert self.windows.num_free == free + expected

    @invariant()
    def pages_are_free_or_referenced(self):
        nodes = self.cache.nodes()
        for pool, owned in (
            (self.blocks, Counter(node.block for node in nodes)),
            (self.windows, Counter(node.window_page for node in nodes if node.window_page is not None)),
        ):
            assert all(pool.references(page) == owned[page] for page in range(pool.num_pages))
            assert len(set(pool._free)) == pool.num_free == sum(not pool.references(p) for p in range(pool.num_pages))

    @invariant()
    def holds_and_chains_are_whole(self):
        nodes = set(self.cache.nodes())
        assert {node.digest: node.references for node in nodes if node.references} == +self.holds
        for node in nodes:
            assert node.parent is None or (node.parent in nodes and node.parent.children[node.digest] is node)
            assert (node.window_page is None) == (node.snapshot is None)


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
