"""The prefix tree: matching, sharing, and who gives way first."""

import pytest

from surefoot.ids import PageId, PointId
from surefoot.state.prefix import LedgerFault, Node, PrefixTree

P = 2


def grow(tree: PrefixTree, tokens: list[int], first_page: int) -> list[Node]:
    """Insert all full pages of `tokens` with page ids from `first_page` on, held once."""
    path: list[Node] = []
    for start in range(0, len(tokens) - P + 1, P):
        parent = path[-1] if path else tree.root
        page = PageId(first_page + start // P)
        node, _ = tree.insert(parent, tuple(tokens[start : start + P]), page, drafted=False)
        path.append(node)
    return path


def let_go(tree: PrefixTree, path: list[Node]) -> None:
    for node in reversed(path):
        tree.drop(node)


def pages(path: list[Node]) -> list[int]:
    return [node.page for node in path]


def test_match_finds_the_longest_prefix_of_whole_pages() -> None:
    tree = PrefixTree(P, bounded=False)
    grow(tree, [1, 2, 3, 4, 5, 6], 10)
    assert pages(tree.match([1, 2, 3, 4, 5, 6, 7], 3)) == [10, 11, 12]
    assert pages(tree.match([1, 2, 3, 4, 5, 9], 3)) == [10, 11]
    assert pages(tree.match([1, 2, 3], 3)) == [10]
    assert tree.match([2, 1, 3, 4], 2) == []


def test_match_stops_at_the_limit() -> None:
    tree = PrefixTree(P, bounded=False)
    grow(tree, [1, 2, 3, 4, 5, 6], 10)
    assert pages(tree.match([1, 2, 3, 4, 5, 6], 2)) == [10, 11]
    assert tree.match([1, 2, 3], 0) == []


def test_a_bounded_match_ends_at_the_deepest_point() -> None:
    tree = PrefixTree(P, bounded=True)
    path = grow(tree, [1, 2, 3, 4, 5, 6], 10)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert tree.match(tokens, 3) == []
    tree.attach(path[0], PointId(5), rolling=False)
    tree.attach(path[1], PointId(6), rolling=False)
    assert pages(tree.match(tokens, 3)) == [10, 11]
    assert tree.detach(path[1]) == 6
    assert pages(tree.match(tokens, 3)) == [10]


def test_a_page_that_is_there_already_is_found_not_replaced() -> None:
    tree = PrefixTree(P, bounded=False)
    first, created = tree.insert(tree.root, (1, 2), PageId(3), drafted=True)
    again, created_again = tree.insert(tree.root, (1, 2), PageId(4), drafted=False)
    assert (created, created_again) == (True, False)
    assert again is first
    assert first.page == 3
    assert first.drafted
    assert first.holders == 2


def test_counts_follow_holders() -> None:
    tree = PrefixTree(P, bounded=False)
    path = grow(tree, [1, 2, 3, 4], 1)
    assert (tree.held, tree.cached) == (2, 0)
    tree.hold(path[0])
    let_go(tree, path)
    assert (tree.held, tree.cached) == (1, 1)
    tree.drop(path[0])
    assert (tree.held, tree.cached) == (0, 2)
    tree.audit()


def test_leaves_go_in_order_of_last_use_and_parents_after_children() -> None:
    tree = PrefixTree(P, bounded=False)
    old = grow(tree, [1, 2, 3, 4], 1)
    new = grow(tree, [5, 6, 7, 8], 11)
    let_go(tree, old)
    let_go(tree, new)
    assert [tree.evict_page() for _ in range(5)] == [
        (2, None),
        (1, None),
        (12, None),
        (11, None),
        None,
    ]
    assert tree.cached == 0
    assert tree.match([1, 2, 3], 1) == []


def test_use_moves_a_leaf_to_the_end_of_the_line() -> None:
    tree = PrefixTree(P, bounded=False)
    first, second = grow(tree, [1, 2], 1), grow(tree, [3, 4], 2)
    let_go(tree, first)
    let_go(tree, second)
    tree.hold(first[0])
    tree.drop(first[0])
    assert tree.evict_page() == (2, None)
    assert tree.evict_page() == (1, None)


def test_held_pages_stay() -> None:
    tree = PrefixTree(P, bounded=False)
    path = grow(tree, [1, 2, 3, 4], 1)
    tree.drop(path[1])
    assert tree.evict_page() == (2, None)
    assert tree.evict_page() is None
    tree.drop(path[0])
    assert tree.evict_page() == (1, None)


def test_a_page_with_children_stays_until_they_are_gone() -> None:
    tree = PrefixTree(P, bounded=False)
    left = grow(tree, [1, 2, 3, 4], 1)
    right = grow(tree, [1, 2, 5, 6], 11)
    let_go(tree, left)
    assert tree.evict_page() == (2, None)
    assert tree.evict_page() is None
    let_go(tree, right)
    assert [tree.evict_page(), tree.evict_page()] == [(12, None), (1, None)]


def test_evicting_a_page_frees_its_point() -> None:
    tree = PrefixTree(P, bounded=True)
    path = grow(tree, [1, 2], 1)
    tree.attach(path[0], PointId(9), rolling=False)
    let_go(tree, path)
    assert tree.evict_page() == (1, 9)
    assert tree.points == 0
    assert tree.evict_point() is None


def test_points_go_in_order_of_last_use_and_leave_the_pages() -> None:
    tree = PrefixTree(P, bounded=True)
    paths = [grow(tree, [token, token, 7, 7], 10 * token) for token in (1, 2, 3)]
    for point, path in enumerate(paths):
        tree.attach(path[-1], PointId(point), rolling=False)
    assert tree.evict_point() is None
    for path in (paths[1], paths[0], paths[2]):
        let_go(tree, path)
    tree.hold(paths[1][0])
    tree.hold(paths[1][1])
    let_go(tree, paths[1])
    assert [tree.evict_point() for _ in range(4)] == [0, 2, 1, None]
    assert tree.cached == 6
    assert tree.points == 0
    tree.audit()


def test_a_node_has_one_point() -> None:
    tree = PrefixTree(P, bounded=True)
    (node,) = grow(tree, [1, 2], 4)
    tree.attach(node, PointId(1), rolling=True)
    with pytest.raises(LedgerFault, match="page 4 has point 1, got another, 2"):
        tree.attach(node, PointId(2), rolling=False)
    tree.detach(node)
    assert not node.rolling
    with pytest.raises(LedgerFault, match="page 4 has no point"):
        tree.detach(node)


def test_a_drop_too_many_is_refused() -> None:
    tree = PrefixTree(P, bounded=False)
    path = grow(tree, [1, 2], 4)
    let_go(tree, path)
    with pytest.raises(LedgerFault, match="page 4 was dropped"):
        tree.drop(path[0])


def test_audit_finds_a_held_child_of_a_parent_let_go() -> None:
    tree = PrefixTree(P, bounded=False)
    path = grow(tree, [1, 2, 3, 4], 1)
    tree.drop(path[0])
    with pytest.raises(LedgerFault, match=r"page 2 has 1 holders.*page 1 has 0"):
        tree.audit()


def test_audit_finds_wrong_links_keys_and_counts() -> None:
    tree = PrefixTree(P, bounded=True)
    path = grow(tree, [1, 2, 3, 4], 1)
    tree.points = 3
    with pytest.raises(LedgerFault, match="0 points, its count says 3"):
        tree.audit()
    tree.points = 0
    path[1].parent = tree.root
    with pytest.raises(LedgerFault, match="page 2 is not the child"):
        tree.audit()
    short, _ = tree.insert(tree.root, (8,), PageId(9), drafted=False)
    path[1].parent = path[0]
    with pytest.raises(LedgerFault, match="page 9 has a key of 1 tokens"):
        tree.audit()
    assert short.holders == 1


def test_100_000_pages_can_be_evicted_one_by_one() -> None:
    """A walk over all pages for each eviction would not end within the time limit."""
    tree = PrefixTree(P, bounded=False)
    for chain in range(1000):
        tokens = list(range(chain * 200, chain * 200 + 200))
        let_go(tree, grow(tree, tokens, first_page=1 + chain * 100))
    evicted = [tree.evict_page() for _ in range(100_000)]
    assert evicted[:2] == [(100, None), (99, None)]
    assert len(set(evicted)) == 100_000
    assert (tree.cached, tree.evict_page()) == (0, None)
