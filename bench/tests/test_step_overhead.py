"""The model that computes nothing runs in today's engine."""

import step_overhead


def test_every_part_of_a_step_takes_time() -> None:
    seconds = step_overhead.measure(2, 3, {"top_n": 2})
    assert list(seconds) == list(step_overhead.PARTS)
    assert all(second > 0 for second in seconds.values())
