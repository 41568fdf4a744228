"""Steps of a profile and intervals of them, made by hand."""

from lightning_batchmem.profile.step import UNREAD, Step, Totals

MIB = 2**20


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None, items=None):
    return Step(
        number,
        "train",
        size,
        seconds,
        wait,
        peak * MIB,
        reserved,
        items=items,
    )


def interval(*steps, reading=UNREAD):
    return Totals(steps, reading)
