"""A full check of the cache's books, against nothing but the tree's links and the sequences' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from sapwood_server.cache.integrity import require
from sapwood_server.cache.node import PageNode
from sapwood_server.cache.pool import PagePool
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tokens import TOKEN_BYTES
from sapwood_server.cache.tree import PrefixTree


def check_cache(
    pool: PagePool,
    tree: PrefixTree,
    tables: Collection[BlockTable],
    copy_sources: Collection[PageNode],
    page_size: int,
) -> None:
    """Raise IntegrityError unless every page is in exactly one state and every counter can be derived."""
    pool.check()
    nodes = list(tree.nodes())
    for node in nodes:
        _check_links(node, page_size)
    _check_uses(tree, nodes, tables, copy_sources)
    _check_pages(pool, tree, nodes, tables, page_size)
    lost = tree.unqueued([node for node in nodes if node.is_evictable])
    require(not lost, f"evictable pages that eviction can't find: {[node.page for node in lost]}")
    for table in tables:
        _check_table(table, page_size)


def _check_links(node: PageNode, page_size: int) -> None:
    where = f"page {node.page}"
    require(node.in_tree, f"{where} is linked but marked as gone")
    require(sorted(node.children) == node.keys, f"{where}: sorted keys and children differ")
    if node.parent is not None:
        require(0 < node.num_tokens <= page_size, f"{where} holds {node.num_tokens} tokens")
        require(node.depth == node.parent.depth + 1, f"{where}: depth {node.depth} under {node.parent.depth}")
        is_full = node.num_tokens == page_size and not node.is_open
        require(is_full or not (node.children or node.open_pages), f"{where} is not full but has children")
        require(not (node.is_open and node.num_tokens == page_size), f"{where} is full but open")
    for key, child in node.children.items():
        require(child.key == key and child.parent is node and not child.is_open, f"page {child.page}: wrong link")
        if not child.uses and child.num_tokens < page_size:
            siblings = [*node.children.values(), *node.open_pages]
            covered = any(other is not child and other.key.startswith(key) for other in siblings)
            require(not covered, f"page {child.page} is unused and a sibling holds all its tokens")
    for page in node.open_pages:
        require(page.is_open and page.parent is node and page.uses > 0, f"open page {page.page}: wrong link")


def _check_uses(
    tree: PrefixTree, nodes: list[PageNode], tables: Collection[BlockTable], copy_sources: Collection[PageNode]
) -> None:
    uses = Counter(id(table.node) for table in tables if table.node is not None)
    uses.update(id(source) for source in copy_sources)
    uses.update(id(node.parent) for node in nodes if node.uses and node.parent is not None)
    for node in nodes:
        require(node.uses == uses[id(node)], f"page {node.page}: {node.uses} uses counted, {uses[id(node)]} found")
    require(not uses.keys() - {id(node) for node in nodes}, "a sequence or copy holds a page that is not in the tree")
    pages = [node for node in nodes if node.parent is not None]
    active = sum(node.uses > 0 for node in pages)
    require(tree.num_pages == len(pages), f"{tree.num_pages} pages counted, {len(pages)} found")
    require(tree.num_active == active, f"{tree.num_active} active pages counted, {active} found")
    empty = [node for node in nodes if node.parent is None and not node.uses and not node.children]
    require(not empty, "an unused root without pages is kept")


def _check_pages(
    pool: PagePool, tree: PrefixTree, nodes: list[PageNode], tables: Collection[BlockTable], page_size: int
) -> None:
    owners = Counter(node.page for node in nodes if node.parent is not None)
    for table in tables:
        owners.update(table.private)
        owners.update(table.unpublished_pages(page_size))
    for page in range(1, pool.num_usable + 1):
        count = owners[page] + pool.is_free(page)
        require(count == 1, f"page {page} is in {count} places")
    require(0 not in owners, "the reserved page is in use")


def _check_table(table: BlockTable, page_size: int) -> None:
    require(
        table.num_published <= table.num_written <= table.num_tokens, f"sequence {table.pages}: counts out of order"
    )
    require(len(table.pages) * page_size >= table.num_written, f"sequence {table.pages}: too few pages")
    chain: list[PageNode] = []
    node = table.node
    while node is not None and node.parent is not None:
        chain.append(node)
        node = node.parent
    chain.reverse()
    tokens = b"".join(node.key for node in chain)
    require(
        tokens == table.data[: table.num_published * TOKEN_BYTES], f"sequence {table.pages}: other tokens in the tree"
    )
    private = [page for page, node in zip(table.pages, chain, strict=False) if page != node.page]
    require(private == table.private, f"sequence {table.pages}: private pages {table.private}, found {private}")
