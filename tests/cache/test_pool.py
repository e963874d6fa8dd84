from __future__ import annotations

import pytest

from sapwood_server.cache.integrity import IntegrityError
from sapwood_server.cache.pool import PagePool


def test_hands_out_every_page_but_the_reserved_one_once() -> None:
    pool = PagePool(4)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, None]
    assert pool.num_free == 0


def test_reuses_the_page_given_back_last() -> None:
    pool = PagePool(4)
    for _ in range(3):
        pool.take()
    pool.give_back(1)
    pool.give_back(3)
    assert [pool.take(), pool.take()] == [3, 1]
    pool.check()


@pytest.mark.parametrize("page", [0, 2, 4, -1])
def test_refuses_a_page_that_is_not_taken(page: int) -> None:
    pool = PagePool(4)
    pool.take()
    with pytest.raises(ValueError, match=f"page {page} is not taken"):
        pool.give_back(page)


def test_refuses_to_give_back_twice() -> None:
    pool = PagePool(4)
    page = pool.take()
    assert page == 1
    pool.give_back(page)
    with pytest.raises(ValueError, match="page 1 is not taken"):
        pool.give_back(page)


def test_refuses_a_pool_without_pages() -> None:
    with pytest.raises(ValueError, match="num_pages is 1; accepted: at least 2"):
        PagePool(1)


def test_check_sees_a_page_that_is_free_twice() -> None:
    pool = PagePool(4)
    pool._free.append(2)
    with pytest.raises(IntegrityError, match="free twice"):
        pool.check()
