"""What counts as served, and what the report requires."""

import pytest
from load import EventParser, LoadError
from overload import Arrival, report, served_rate


def served(first_s: float) -> Arrival:
    """An answer of two tokens, one second apart."""
    return Arrival(0.0, 0.5, 200, [first_s, first_s + 1.0], first_s + 1.0, None)


def test_only_tokens_between_the_ramp_and_the_last_arrival_count() -> None:
    refused = Arrival(0.0, 0.5, 429, [], 0.6, 3)
    assert served_rate([served(1.0), served(2.0), served(7.9), refused], 8.0) == 4 / 6.0
    assert (served(2.0).wait_s, refused.wait_s) == (1.5, pytest.approx(0.1))


def test_a_refusal_says_when_to_come_back() -> None:
    parser = EventParser()
    parser.feed(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}")
    assert (parser.status, parser.retry_after_s) == (429, 7)


def test_a_load_without_a_refusal_is_not_an_overload() -> None:
    with pytest.raises(LoadError, match="0 refused"):
        report({"repeats": [{"arrivals": [fields_of(served(1.0))]}]})


def fields_of(arrival: Arrival) -> dict[str, object]:
    return {name: getattr(arrival, name) for name in Arrival.__slots__}
