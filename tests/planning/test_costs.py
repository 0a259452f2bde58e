"""What times that spread widely may say of a token at most."""

from __future__ import annotations

import pytest

from gplan.planning.costs import most_pair_us, slope
from gplan.scheduling.times import pairs_timed


def test_comparing_tokens_takes_no_more_than_there_is_to_explain() -> None:
    assert most_pair_us({8: 100.0, 16: 90.0, 32: 628.0}, 1024) == pytest.approx((628 - 90) / pairs_timed(32, 1024))
    assert most_pair_us({7: 28.0}, 9) == pytest.approx(1.0), "all of one size's time: 7 tokens are 28 pairs"
    assert most_pair_us({7: 50.0, 14: 20.0}, 9) == 0.0, "the largest is the quickest"


def test_pairs_are_those_of_as_few_prompts_as_there_can_be() -> None:
    assert [pairs_timed(size, 4) for size in range(7)] == [0, 1, 3, 6, 7, 9, 12]


def test_a_slope_does_not_fall() -> None:
    assert slope([(0, 0), (2, 4), (4, 8)]) == 2.0
    assert slope([(0, 0), (2, -4)]) == slope([(0, 0)]) == 0.0
