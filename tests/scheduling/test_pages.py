"""Page accounting: what is given out comes back once, and the dummy page never leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import DUMMY_PAGE
from gplan.scheduling.pages import PageAccount


@given(st.integers(1, 40), st.lists(st.integers(0, 12), max_size=60))
def test_pages_are_given_out_once(num_pages: int, wants: list[int]) -> None:
    account = PageAccount(num_pages)
    held: list[list[int]] = []
    for want in wants:
        if want <= account.num_free:
            held.append(account.take(want))
        elif held:
            account.give_back(held.pop(len(held) // 2))
        pages = [page for group in held for page in group]
        assert len(set(pages)) == len(pages) == account.num_held
        assert DUMMY_PAGE not in pages
        account.check(())


def test_more_than_is_free_is_our_bug() -> None:
    account = PageAccount(4)
    account.take(2)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        account.take(2)


def test_a_page_that_comes_back_twice_is_caught() -> None:
    account = PageAccount(4)
    pages = account.take(2)
    account.give_back(pages)
    with pytest.raises(AssertionError, match="not given out"):
        account.give_back(pages)


def test_a_dummy_page_that_comes_back_is_caught() -> None:
    account = PageAccount(4)
    account.take(1)
    with pytest.raises(AssertionError, match="not given out"):
        account.give_back([DUMMY_PAGE])
