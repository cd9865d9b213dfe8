"""`LLM` is compared with the best load of the same repeat."""

from figure import BENCHMARKS


def test_llm_is_compared_with_the_best_load_of_the_same_repeat() -> None:
    repeats = [
        {"LLM": 90.0, "server": {"64": 80.0, "128": 100.0}},
        {"LLM": 60.0, "server": {"64": 50.0, "128": 40.0}},
    ]
    figures = {figure.name: figure for figure in BENCHMARKS["llm"]({"repeats": repeats})}
    assert figures["server, 128 streams"].values == [100.0, 40.0]
    assert figures["LLM.generate to the server at its best load"].values == [0.9, 1.2]
