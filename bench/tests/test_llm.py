"""`LLM` is compared with the load of the server that was best in the first pass."""

from figure import BENCHMARKS


def test_llm_is_compared_with_the_best_load_of_the_first_pass() -> None:
    repeats = [{"LLM": 90.0, "server": {"128": 100.0}}, {"LLM": 60.0, "server": {"128": 50.0}}]
    record = {"scan": {"64": 80.0, "128": 110.0}, "repeats": repeats}
    figures = {figure.name: figure for figure in BENCHMARKS["llm"](record)}
    assert figures["server, 128 streams"].values == [100.0, 50.0]
    assert figures["LLM.generate to the server at its best load"].values == [0.9, 1.2]
