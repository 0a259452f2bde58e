"""Lists of buckets and sizes on the command line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cli.plan import plan
from gplan.errors import GplanError
from gplan.planning.options import MAX_BUCKETS, MAX_SIZE, format_buckets, parse_buckets


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1", (1,)),
        ("8,1,4, 2", (1, 2, 4, 8)),
        ("4,4,4", (4,)),
        ("1-4", (1, 2, 3, 4)),
        ("8-32:8", (8, 16, 24, 32)),
        ("1-24:8", (1, 8, 16, 24)),
        ("3-10:4", (3, 4, 8, 10)),
        ("5-5:3", (5,)),
        ("2-5:64", (2, 5)),
        ("1,2,4,8-64:16", (1, 2, 4, 8, 16, 32, 48, 64)),
    ],
)
def test_lists_and_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_buckets(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", "0", "-4", "4-", "8-4", "1-8:0", "1.5", "one", "1--4", "1-4:2:2", "1;2", "٣", f"{MAX_SIZE + 1}"],
)
def test_what_is_no_list_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(GplanError) as caught:
        parse_buckets(text)
    assert "8-64:8" in caught.value.hint


@pytest.mark.parametrize("text", [f"1-{MAX_SIZE}", f"1-{MAX_BUCKETS},{MAX_BUCKETS + 1}", "1-" + "9" * 5000])
def test_a_slip_of_the_pen_is_not_a_million_buckets(text: str) -> None:
    with pytest.raises(GplanError):
        parse_buckets(text)


@given(st.lists(st.integers(1, MAX_SIZE), min_size=1, max_size=40))
def test_what_is_written_is_read_back(sizes: list[int]) -> None:
    expected = tuple(sorted(set(sizes)))
    assert parse_buckets(format_buckets(expected)) == expected


@given(st.integers(1, 2000), st.integers(0, 900), st.integers(1, 64))
def test_a_range_has_its_ends_and_multiples_only(first: int, length: int, step: int) -> None:
    last = first + length
    sizes = parse_buckets(f"{first}-{last}:{step}")
    assert sizes[0] == first
    assert sizes[-1] == last
    assert all(size % step == 0 for size in sizes if size not in (first, last))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--memory", "24 gigs"),
        ("--memory", "0%"),
        ("--memory", "120%"),
        ("--memory", "0MiB"),
        ("--decode-buckets", "1,x"),
        ("--prefill-buckets", "0"),
        ("--max-batch", "0"),
        ("--max-len", "-1"),
        ("--decode-backend", "fastest"),
        ("--dtype", "int8"),
        ("--decode-variants", "fast"),
        ("--prefill-slots", "0"),
    ],
)
def test_a_wrong_value_is_a_usage_error_before_any_work(flag: str, value: str) -> None:
    result = CliRunner().invoke(plan, ["nowhere", "-o", "x.gplan", flag, value])
    assert result.exit_code == 2
    assert flag in result.stderr
    assert result.stdout == ""
