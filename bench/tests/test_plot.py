"""From a comparison's raw samples to the points of its plot."""

from typing import Any

import plot
from penstock_server.bench.point import Percentiles, Point


def loads(tokens_per_s: float, ttft_s: float) -> dict[str, Any]:
    return {"8 streams": {"tokens_per_s": tokens_per_s, "ttft_s": [ttft_s], "gaps_us": [[1000, 3000]]}}


def test_points_are_medians_and_percentiles_over_the_repeats() -> None:
    record = {
        "load": {"input_tokens": 128, "output_tokens": 64, "streams": [8]},
        "repeats": [
            {
                "penstock": {"loads": loads(rate, ttft_s)},
                "failed": {"error": "no"},
                "transformers": {"loads": {"8": {"tokens_per_s": rate / 10}}},
            }
            for rate, ttft_s in ((100, 0.1), (300, 0.3), (200, 0.2))
        ],
    }
    assert plot.points(record) == {
        "penstock": [
            Point(8, 200, Percentiles(204, 304, 304), Percentiles(200, 300, 300), Percentiles(1, 3, 3), num_requests=3)
        ],
        "transformers": [Point(8, 20, None, None, None, num_requests=0)],
    }
    assert b"128 tokens in, 64 out" in plot.comparison(record)
