"""What limits a run."""

import pytest

from lightning_batchmem.profile.conclusion import conclusion


@pytest.mark.parametrize(
    ("wait", "held", "busy", "start"),
    [
        (0.64, 990, 89.0, "Limited by data: 64% of the time passed before the batch arrived."),
        (0.5, 990, None, "Limited by memory: 99% of the limit."),
        # A busy device works while the process waits.
        (0.9, 990, 95.0, "Limited by compute: the device was 95% busy."),
        (0.1, 970, 60.0, "Limited by memory: 97% of the limit."),
        (None, 900, None, "Limited by memory: 90% of the limit."),
        # These numbers do not decide.
        (0.3, 890, 80.0, ""),
        (None, None, None, ""),
    ],
)
def test_the_largest_limit_is_named(wait, held, busy, start):
    text = conclusion(data_wait_share=wait, held_bytes=held, limit_bytes=1000, busy_percent=busy)
    assert text.startswith(start)
    assert bool(text) == bool(start)


def test_without_a_limit_memory_does_not_decide():
    assert not conclusion(
        data_wait_share=0.0, held_bytes=10**9, limit_bytes=None, busy_percent=None
    )
