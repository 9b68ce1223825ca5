"""Host-side page allocators of the paged caches: reference-counted pools and the prefix cache over them.

Two kinds of page exist (docs/ops.md): an *entry block* holds the compressed entries of 256 tokens for all compressed
layers, a *window page* holds the window rows of 128 tokens. Both are plain integers here; nothing imports torch.

A prefix can be resumed after a whole number of blocks if three things are still there: the entry blocks, the window
page that ends the last block (one page covers the attention window of 128), and a snapshot of what is not paged (the
compressor's tail rows and the last residual streams). A node without the last two still prolongs a chain.

Errors: ``ValueError`` for misuse by the caller, :class:`OutOfPages` when a pool is exhausted.
"""

import hashlib
import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 256
PAGE_TOKENS = 128
_ROOT = hashlib.sha256(b"dsv4 prefix").digest()


class OutOfPages(RuntimeError):
    """A pool has fewer free pages than were asked for."""


class PagePool:
    """Pages ``0 … num_pages−1`` with a reference count each; a page with count 0 is free.

    The page freed last is handed out first, so a small working set stays small.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """How many owners a page has; 0 for a free one."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page must be in [0, {self.num_pages}), got {page}")
        return self._references[page]

    def allocate(self, count: int = 1) -> list[int]:
        """Take ``count`` free pages, all or none, each with one reference."""
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        if count > self.num_free:
            raise OutOfPages(f"count must be at most the {self.num_free} free of {self.num_pages} pages, got {count}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> int:
        """Add an owner to an allocated page and return the page."""
        self._check_allocated(page, "shared")
        self._references[page] += 1
        return page

    def free(self, page: int) -> None:
        """Drop one owner; the page becomes free with its last one."""
        self._check_allocated(page, "freed")
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def _check_allocated(self, page: int, verb: str) -> None:
        if not self.references(page):
            raise ValueError(f"a page must be allocated to be {verb}, got free page {page}")


@dataclass(eq=False, kw_only=True)
class PrefixNode:
    """One cached block of 256 tokens, identified by the digest of everything up to its end."""

    digest: bytes
    parent: "PrefixNode | None"
    depth: int  # blocks from the start, this one included
    block: int
    window_page: int | None = None
    snapshot: object | None = None
    references: int = 0
    clock: int = 0
    children: "dict[bytes, PrefixNode]" = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.depth * BLOCK_TOKENS

    @property
    def resumable(self) -> bool:
        return self.window_page is not None and self.snapshot is not None

    def chain(self) -> "list[PrefixNode]":
        """The nodes from the start of the text to this one."""
        nodes = list(self._upwards())
        nodes.reverse()
        return nodes

    def _upwards(self) -> "Iterator[PrefixNode]":
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixCache:
    """Reusable prefix blocks in a hash-chained tree. The cache owns one reference of every page that a node names.

    A request holds the node where its text currently ends in the tree (``acquire``/``release``). Held nodes and nodes
    with children are never evicted, so a held chain stays whole.
    """

    def __init__(self, blocks: PagePool, window_pages: PagePool) -> None:
        self._blocks = blocks
        self._window_pages = window_pages
        self._nodes: dict[bytes, PrefixNode] = {}
        self._held: dict[bytes, PrefixNode] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> list[PrefixNode]:
        return list(self._nodes.values())

    def match(self, tokens: Sequence[int]) -> PrefixNode | None:
        """The deepest resumable node of ``tokens``, or None.

        At least one token is always left over: its logits have to be computed.
        """
        best, digest = None, _ROOT
        for start in range(0, (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            digest = _digest(digest, tokens[start : start + BLOCK_TOKENS])
            node = self._nodes.get(digest)
            if node is None:
                break
            best = node if node.resumable else best
        return best

    def insert(
        self,
        parent: PrefixNode | None,
        tokens: Sequence[int],
        block: int,
        window_page: int | None = None,
        snapshot: object | None = None,
    ) -> PrefixNode:
        """Add the block of ``tokens`` that follows ``parent``, sharing its pages; an existing node keeps its own block.

        A window page and a snapshot go together: with only one of them, neither is kept. They complete an existing
        node that lacks them.
        """
        if len(tokens) != BLOCK_TOKENS:
            raise ValueError(f"a prefix block must have {BLOCK_TOKENS} tokens, got {len(tokens)}")
        if parent is not None:
            self._check_member(parent)
        digest = _digest(parent.digest if parent else _ROOT, tokens)
        node = self._nodes.get(digest)
        if node is None:
            depth = parent.depth + 1 if parent else 1
            node = PrefixNode(digest=digest, parent=parent, depth=depth, block=self._blocks.share(block))
            self._nodes[digest] = node
            if parent is not None:
                parent.children[digest] = node
        if not node.resumable and window_page is not None and snapshot is not None:
            node.window_page, node.snapshot = self._window_pages.share(window_page), snapshot
        self._touch(node)
        return node

    def acquire(self, node: PrefixNode) -> PrefixNode:
        """Hold a node, and with it its chain, against eviction."""
        self._check_member(node)
        node.references += 1
        self._held[node.digest] = node
        for member in node._upwards():
            self._touch(member)
        return node

    def release(self, node: PrefixNode) -> None:
        """Undo one ``acquire``."""
        self._check_member(node)
        if not node.references:
            raise ValueError(f"a prefix node must be held to be released, got depth {node.depth} with 0 references")
        node.references -= 1
        if not node.references:
            del self._held[node.digest]

    @property
    def num_evictable(self) -> int:
        """Nodes that ``evict`` could drop: those with no held node at or below them."""
        kept: set[bytes] = set()
        for held in self._held.values():
            for node in held._upwards():
                if node.digest in kept:
                    break
                kept.add(node.digest)
        return len(self._nodes) - len(kept)

    def evict(self, count: int) -> int:
        """Drop up to ``count`` nodes, the least recently used leaf that nobody holds first; returns how many."""
        heap = [(node.clock, node.digest) for node in self._nodes.values() if self._is_free_leaf(node)]
        heapq.heapify(heap)
        dropped = 0
        while heap and dropped < count:
            node = self._nodes.pop(heapq.heappop(heap)[1])
            self._blocks.free(node.block)
            self._strip(node)
            dropped += 1
            if node.parent is not None:
                del node.parent.children[node.digest]
                if self._is_free_leaf(node.parent):
                    heapq.heappush(heap, (node.parent.clock, node.parent.digest))
        return dropped

    @property
    def num_reclaimable_window_pages(self) -> int:
        """Window pages that only the cache owns."""
        return sum(self._owns_window_page(node) for node in self._nodes.values())

    def reclaim_window_pages(self, count: int) -> int:
        """Give up to ``count`` window pages back, least recently used first; returns how many became free.

        The nodes stay, held or not, and are no longer resumable; a page that a request still reads is not touched.
        """
        owned = [node for node in self._nodes.values() if self._owns_window_page(node)]
        chosen = heapq.nsmallest(max(count, 0), owned, key=lambda node: node.clock)
        for node in chosen:
            self._strip(node)
        return len(chosen)

    def _owns_window_page(self, node: PrefixNode) -> bool:
        return node.window_page is not None and self._window_pages.references(node.window_page) == 1

    def _strip(self, node: PrefixNode) -> None:
        if node.window_page is not None:
            self._window_pages.free(node.window_page)
        node.window_page = node.snapshot = None

    def _is_free_leaf(self, node: PrefixNode) -> bool:
        return not node.references and not node.children

    def _touch(self, node: PrefixNode) -> None:
        self._clock += 1
        node.clock = self._clock

    def _check_member(self, node: PrefixNode) -> None:
        if self._nodes.get(node.digest) is not node:
            raise ValueError(f"a prefix node must be in the cache, got an evicted one of depth {node.depth}")


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
