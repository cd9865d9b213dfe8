"""The figures of models with states."""

from __future__ import annotations

from typing import Any

from figure import states


def test_a_figure_compares_each_load_and_each_server_s_cache() -> None:
    def measured(tokens_per_s: float, ttft_s: float, next_s: float) -> dict[str, Any]:
        loads = {
            "8 streams": {"tokens_per_s": tokens_per_s},
            "ttft 512": {"ttft_s": [ttft_s]},
            "decode": {"decode_tokens_per_s": tokens_per_s},
        }
        return {"loads": loads, "turns": {"next": [next_s], "new": [6.0]}}

    repeat = {"lfm2 bf16 penstock": measured(30, 1, 0.5), "lfm2 bf16 llama.cpp": measured(10, 3, 2)}
    limits = {"read_bytes_per_s": {"1": 50.0, "2": 100.0}, "product_flop_per_s": {}}
    record = {"repeats": [repeat, repeat], "limits": limits, "weight_bytes": {"lfm2 bf16": 2}}
    figures = {figure.name: figure for figure in states(record)}
    assert figures["lfm2 bf16, 8 streams: speed to llama.cpp"].values == [3, 3]
    assert figures["lfm2 bf16, ttft 512: speed to llama.cpp"].values == [3, 3]
    assert figures["lfm2 bf16, decode: share of the limit of memory"].values == [0.6, 0.6]
    saved = "time to the next turn's first token, faster than new"
    assert figures[f"lfm2 bf16, penstock: {saved}"].values == [12, 12]
    assert figures[f"lfm2 bf16, llama.cpp: {saved}"].values == [3, 3]


def test_without_the_peer_there_is_no_speed_to_it() -> None:
    loads = {"decode": {"decode_tokens_per_s": 30}}
    repeat = {"lfm2 bf16 penstock": {"loads": loads, "turns": {"next": [1.0], "new": [6.0]}}}
    limits = {"read_bytes_per_s": {"2": 100.0}, "product_flop_per_s": {}}
    record = {"repeats": [repeat], "limits": limits, "weight_bytes": {"lfm2 bf16": 2}}
    assert len(list(states(record))) == 2
