"""Test numbers in readable units, also if rounding reaches the next unit."""

from __future__ import annotations

import pytest

from burst_portable.utils.text import bytes_text, percent, scaled, seconds_text, split_list, time_text


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(1023 * 1024), "1023 KiB"),
        (bytes_text(1024 * 1024 - 1), "1 MiB"),
        (bytes_text(9.999 * 2**20), "10 MiB"),
        (bytes_text(130 * 2**30), "130 GiB"),
        (scaled(15e9, "FLOP/s"), "15 GFLOP/s"),
        (scaled(999.7e6, "B/s"), "1 GB/s"),
        (scaled(0.1234, ""), "0.123 "),
        (scaled(2e21, "FLOP"), "2000 EFLOP"),
        (seconds_text(0), "0 s"),
        (seconds_text(0.157), "157 ms"),
        (seconds_text(0.99996), "1 s"),
        (seconds_text(3e-5), "30 µs"),
        (time_text(0), "0 ns"),
        (time_text(1_500_000), "1.50 ms"),
        (time_text(999_960), "1.00 ms"),
        (time_text(99_960_000), "100 ms"),
        (percent(0.1234), "12.3 %"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(told, text):
    assert told == text


def test_split_list_keeps_parentheses_together():
    assert split_list("auto,ring(a=1, b=2),ulysses") == ["auto", "ring(a=1, b=2)", "ulysses"]
    assert split_list("ring(a=1, b=2)") == ["ring(a=1, b=2)"]
    assert split_list("a,,b") == ["a", "", "b"]
    assert split_list("ring(a=1,b") == ["ring(a=1", "b"]
