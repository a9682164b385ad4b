"""From seconds to rates."""

from __future__ import annotations

from typing import NamedTuple

_LEAST_LATENCY = 1e-7  # seconds: less is noise, and 0 would mean that nothing is known


class Speed(NamedTuple):
    """TFLOP/s, and seconds of latency per call; `apart`: whether the two lengths could tell these apart."""

    tflops: float
    latency: float
    apart: bool


def speed(short: tuple[float, float], long: tuple[float, float]) -> Speed:
    """From (FLOPs, seconds) of a short call and of a long one: time is latency + FLOPs / rate.

    Where that would be no latency, or no rate, all of the long call's time counts as computing: its own rate.
    """
    (few, fast), (many, slow) = short, long
    if slow > fast and (latency := fast - few * (slow - fast) / (many - few)) >= _LEAST_LATENCY:
        return Speed((many - few) / (slow - fast) / 1e12, latency, True)
    return Speed(many / slow / 1e12, _LEAST_LATENCY, False)


def share_held_up(kernel: float, messages: float, both: float) -> float | None:
    """The share of their time that messages keep kernels waiting which run beside them, from seconds of each alone and
    of both together; None where messages take longer than the kernels, which then may or may not be why both do.

    That of `rates.Rates.holds_up`: both take kernel + share * messages.
    """
    if messages > kernel:
        return None
    return min(1.0, max(0.0, (both - kernel) / messages))


def gigabytes_a_second(size: float, seconds: float) -> float:
    """GB/s."""
    return size / seconds / 1e9
