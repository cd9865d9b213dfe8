"""The quoted figures of each benchmark: from a raw record to named values, one for each repeat."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memory import beyond_torch, columns, parts
from table import best_limits, figures, floors, markdown

Record = dict[str, Any]
POLICIES = {"Prefix": "Penstock's policy", "Work": "by work alone", "RoundRobin": "round robin"}
TARGET = re.compile(r"(?P<relation>[≥≤<]?) ?(?P<bound>−?[\d,.]+)( [^ ]+)?")
CRITERION_SAMPLES = 30  # samples of each benchmark in scheduler/benches/step.rs


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: a value for each repeat, or a count that one run adds up."""

    name: str
    target: str
    values: Sequence[float]
    unit: str = ""
    decimals: int = 2
    is_count: bool = False
    num_samples: int = 0  # number of samples, if `values` are an interval and its median

    @property
    def num_repeats(self) -> int:
        return self.num_samples or len(self.values)

    def text(self, value: float) -> str:
        return f"{value:,.{self.decimals}f}{self.unit}"

    @property
    def is_missed(self) -> bool:
        """Whether its median, or its sum if it is a count, misses the target. A figure without a target misses none."""
        if not (found := TARGET.fullmatch(self.target)):
            return False
        bound = float(found["bound"].replace("−", "-").replace(",", ""))
        value = sum(self.values) if self.is_count else statistics.median(self.values)
        value = round(value, self.decimals)
        return {"≥": value < bound, "≤": value > bound, "<": value >= bound, "": value != bound}[found["relation"]]

    def row(self) -> list[str]:
        if self.is_count:
            return [self.name, self.target, self.text(sum(self.values)), "", "one run"]
        low, high = min(self.values), max(self.values)
        spread = f"{self.text(low)} to {self.text(high)}"
        return [self.name, self.target, self.text(statistics.median(self.values)), spread, str(self.num_repeats)]


def table_of(quoted: Iterable[Figure]) -> str:
    header = ["figure", "target", "median", "range", "repeats"]
    return markdown(header, [figure.row() for figure in quoted])


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = ordered[int(place)]
    return low + (ordered[min(int(place) + 1, len(ordered) - 1)] - low) * (place - int(place))


def compare(record: Record) -> Iterator[Figure]:
    """Penstock and every peer: all columns of the comparison."""
    floor = floors(best_limits(record), record["model"], record["load"])
    names = dict.fromkeys(name for repeat in record["repeats"] for name in repeat)
    by_server = {
        name: [figures(repeat[name]) for repeat in record["repeats"] if "loads" in repeat.get(name, {})]
        for name in names
    }
    for column in floor:
        is_time = column.startswith("ttft")
        for name, repeats in by_server.items():
            if is_time:
                yield Figure(f"{name}: {column} tokens", "", [row[column] * 1e3 for row in repeats], " ms", 0)
            else:
                yield Figure(f"{name}: {column}", "", [row[column] for row in repeats], " tokens/s", 0)
        ours = [row[column] for row in by_server["penstock"]]
        shares = [floor[column] / value if is_time else value / floor[column] for value in ours]
        yield Figure(f"penstock: {column}, share of the machine's limit", "≥ 0.9", shares)
        # Repeat by repeat, to the peer that is best in this column.
        peers = [rows for name, rows in by_server.items() if rows and not name.startswith("penstock")]
        best = [(min if is_time else max)(row[column] for row in rows) for rows in zip(*peers, strict=False)]
        ratios = [other / mine if is_time else mine / other for mine, other in zip(ours, best, strict=False)]
        yield Figure(f"penstock: {column}, speed to the best peer", "≥ 1.15", ratios)


def latency(record: Record) -> Iterator[Figure]:
    for name in record["servers"]:
        results = [repeat[name] for repeat in record["repeats"] if "error" not in repeat[name]]
        for load in ("without", "with"):
            p99 = [percentile(result[load]["gaps_us"], 0.99) / 1e3 for result in results]
            yield Figure(f"{name}: p99 gap of 8 streams, {load} 4,000-token prompts", "", p99, " ms", 1)
        ratios = [
            percentile(result["with"]["gaps_us"], 0.99) / percentile(result["without"]["gaps_us"], 0.99)
            for result in results
        ]
        yield Figure(f"{name}: p99 gap with those prompts, to without", "≤ 2", ratios)
        prompts = [float(len(result["with"]["prompt_ttft_s"])) for result in results]
        yield Figure(f"{name}: prompts that arrived meanwhile", "", prompts, "", 0)


def overload(record: Record) -> Iterator[Figure]:
    repeats = record["repeats"]
    waits = {
        status: [
            [
                (one["event_s"][0] if one["event_s"] else one["ended_s"]) - one["sent_s"]
                for one in repeat["arrivals"]
                if one["status"] == status
            ]
            for repeat in repeats
        ]
        for status in (200, 429)
    }
    factor = f"{record['factor']:g} × capacity"
    yield Figure(f"throughput at {factor}, to the best", "≥ 0.95", [repeat["ratio"] for repeat in repeats], "", 3)
    admitted = [percentile(values, 0.99) for values in waits[200]]
    yield Figure(f"p99 TTFT of admitted requests at {factor}", "", admitted, " s")
    refused = [percentile(values, 0.5) * 1e3 for values in waits[429]]
    yield Figure(f"time to a 429 at {factor}", "", refused, " ms", 1)


def multi_turn(record: Record) -> Iterator[Figure]:
    for turn in zip(*record["turns"], strict=True):
        ratios = [statistics.median(one["ttft_s"]["off"]) / statistics.median(one["ttft_s"]["on"]) for one in turn]
        target = "≥ 5" if turn[0]["history_tokens"] == 2000 else ""
        name = f"TTFT without / with the prefix cache, {turn[0]['history_tokens']:,} tokens of history"
        yield Figure(name, target, ratios)
    pairs = [100 * (pair["on"] / pair["off"] - 1) for pair in record["random"]]
    yield Figure("throughput with the prefix cache where nothing is cached, to without", "≥ −1 %", pairs, " %", 1)


def run_ahead(record: Record) -> Iterator[Figure]:
    for streams, repeats in record["loads"].items():
        for depth in repeats[0]:
            idle = [repeat[depth]["idle_s"] * 1e6 for repeat in repeats]
            yield Figure(f"worker idle time per decode step, {streams} streams, {depth} in flight", "", idle, " µs", 0)


def death(record: Record) -> Iterator[Figure]:
    for server in record["servers"]:
        for standby in (True, False):
            total = [kill["total_ms"] / 1e3 for kill in server["kills"] if kill["with_reserve"] is standby]
            group = "with" if standby else "without"
            name = f"worker death to next token, {server['ranks']} rank(s), {group} a standby group"
            yield Figure(name, "≤ 3 s", total, " s")


def chaos(record: Record) -> Iterator[Figure]:
    for name, part in record["parts"].items():
        if part["done"] and name.startswith(("kills", "drains", "cancels", "malformed")):
            yield Figure(name, "", [part["done"]], "", 0, is_count=True)
            yield Figure(f"{name}: answers that differ", "0", [len(part["differences"])], "", 0, is_count=True)
            for key, what in (("answers", "answers compared"), ("handovers", "streams that moved to another server")):
                if key in part:
                    yield Figure(f"{name}: {what}", "", [part[key]], "", 0, is_count=True)
    slow = record["parts"].get("slow readers")
    if slow and slow["done"]:
        pairs = zip(slow["times_s"]["beside"], slow["times_s"]["without"], strict=True)
        ratios = [beside / without for beside, without in pairs]
        yield Figure("time of other clients alongside 16 that do not read, to without", "1", ratios, "", 3)


def soak(record: Record) -> Iterator[Figure]:
    part = record["parts"]["soak"]
    yield Figure("soak", "≥ 30 min", [part["done"]], " min", 0, is_count=True)
    yield Figure("soak: answers compared", "", [part["answers"]], "", 0, is_count=True)
    yield Figure("soak: answers that differ", "0", [len(part["differences"])], "", 0, is_count=True)
    for name, slope in part["slopes"].items():
        if name.endswith("rss_bytes"):
            error = slope["error_per_hour"] / 1e6
            growth = f"soak: growth per hour of {name.replace('_', ' ')} (± {error:.2f} MB)"
            yield Figure(growth, "flat", [slope["per_hour"] / 1e6], " MB", 2, is_count=True)


def scheduler(record: Record) -> Iterator[Figure]:
    for name, estimate in record["plan_and_apply_per_step"].items():
        target = "≤ 50 µs" if name == "running/256" else ""
        values = [estimate["median_95_us"][0], estimate["median_us"], estimate["median_95_us"][1]]
        quantity = f"plan and apply one step, {name.replace('_', ' ')} (95 % interval)"
        yield Figure(quantity, target, values, " µs", 1, num_samples=CRITERION_SAMPLES)


def determinism(record: Record) -> Iterator[Figure]:
    for num_rows, results in record["rows"].items():
        ours = results["penstock"]["seconds"]
        for name, result in results.items():
            if name != "penstock":
                ratios = [theirs / mine for theirs, mine in zip(result["seconds"], ours, strict=True)]
                yield Figure(f"matrix products of a step, {num_rows} rows: {name} time / penstock time", "", ratios)
            rows = f"{num_rows} rows: {name}, rows of {result['compared']} with other bits than alone"
            yield Figure(rows, "0" if name == "penstock" else "", [result["changed"]], "", 0, is_count=True)


def load(record: Record) -> Iterator[Figure]:
    for model, result in record["models"].items():
        for state, repeats in result["repeats"].items():
            raw = [repeat["raw_read_s"] for repeat in repeats]
            loads = [repeat["load"]["seconds"] for repeat in repeats]
            ready = [repeat["server"]["ready_s"] for repeat in repeats]
            peaks = [
                (repeat["load"]["rss_bytes"]["peak"] - repeat["load"]["rss_bytes"]["before"])
                / repeat["load"]["weight_bytes"]
                for repeat in repeats
            ]
            where = f"{model}, {state} pages"
            yield Figure(f"{where}: raw read of the files", "", raw, " s")
            yield Figure(f"{where}: load the weights", "", loads, " s")
            yield Figure(f"{where}: start to ready", "", ready, " s")
            yield Figure(f"{where}: peak memory of loading, to the weights", "≤ 1.2", peaks)


def router(record: Record) -> Iterator[Figure]:
    for cells in zip(*record["costs"], strict=True):
        where = f"{cells[0]['route']}, {cells[0]['streams']} streams"
        per_token = [cell["cpu_us_per_token"] for cell in cells if cell["cpu_us_per_token"] is not None]
        yield Figure(f"router CPU per token, {where}", "", per_token, " µs", 1)
    for name, gaps in record["delay"].items():
        p999 = [one["p999_us"] / 1e3 for one in gaps]
        yield Figure(f"p99.9 gap of 64 streams, {name} long prompts, no model", "", p999, " ms", 1)


def grammar(record: Record) -> Iterator[Figure]:
    for mode in ("greedy, schema", "greedy, regex", "drawn, schema"):
        ratios = [
            statistics.median(
                one["wall_s"] / other["wall_s"]
                for one, other in zip(repeat[mode], repeat[mode.split(",")[0]], strict=True)
            )
            for repeat in record["repeats"]
        ]
        yield Figure(f"decode step of {record['streams']} streams, {mode}, to no grammar", "", ratios, "", 3)


def simulation(record: Record) -> Iterator[Figure]:
    for name in ("steps", "deaths", "preemptions"):
        yield Figure(
            f"simulation without a broken invariant: {name}", "", [record["counts"][name]], "", 0, is_count=True
        )


def step_overhead(record: Record) -> Iterator[Figure]:
    for mode, repeats in record["modes"].items():
        totals = [1e6 * sum(repeat.values()) for repeat in repeats]
        yield Figure(f"decode step outside the model, {record['sequences']} sequences, {mode}", "", totals, " µs", 0)


def quantized(record: Record) -> Iterator[Figure]:
    """Speed to llama.cpp on the same file and to Penstock in bf16, and the cost in quality."""
    keys = {"ttft 512": "ttft_s", "ttft 2000": "ttft_s", "decode": "decode_tokens_per_s"}
    isa = record.get("cpu_isa", "")
    targets = {
        "llama.cpp": {"1 streams": 1.0, "8 streams": 1.5, "32 streams": 1.5}
        if isa
        else {"1 streams": 1.3, "8 streams": 2.0, "32 streams": 2.0, "ttft 512": 2.0, "ttft 2000": 2.0},
        "penstock": {"1 streams": 2.5, "8 streams": 2.0, "32 streams": 1.7},
    }
    repeats = [{name: one["loads"] for name, one in repeat.items()} for repeat in record["repeats"]]

    def speeds(name: str, load: str) -> list[float]:
        values = [repeat[name][load][keys.get(load, "tokens_per_s")] for repeat in repeats]
        return [1 / statistics.median(value) if load.startswith("ttft") else value for value in values]

    for name in repeats[0] if repeats else ():
        kind = name.removeprefix("penstock ")
        if kind == name:
            continue
        for load in repeats[0][name]:
            for other in (f"llama.cpp {kind.partition(',')[0]}", "penstock bf16"):
                if other == name or other not in repeats[0]:
                    continue
                target = targets[other.partition(" ")[0]].get(load) if "of 16 bits" not in kind else None
                pairs = zip(speeds(name, load), speeds(other, load), strict=True)
                quoted = [ours / theirs for ours, theirs in pairs]
                yield Figure(f"{kind}, {load}: speed to {other}", f"≥ {target}" if target else "", quoted)
        if "limits" in record:
            bandwidth = max(best_limits(record)["read_bytes_per_s"].values())
            floor_s = record["weight_bytes"][kind.partition(",")[0]] / bandwidth
            target = "≥ 0.8" if kind.startswith("Q4") and "of 16 bits" not in kind and not isa else ""
            yield Figure(
                f"{kind}, decode: share of the limit of memory", target, [v * floor_s for v in speeds(name, "decode")]
            )
    for kind, found in record["quality"].items():
        mean = statistics.fmean
        change = math.exp(mean(found["nll"]) - mean(found["nll_dense"])) - 1
        yield Figure(f"{kind}: perplexity above that of the dense weights", "", [100 * change], " %", is_count=True)
        divergence = [mean(found["divergence"])]
        yield Figure(f"{kind}: divergence from the dense weights (nats)", "", divergence, "", 4, is_count=True)


def states(record: Record) -> Iterator[Figure]:
    """Models with states: speed to llama.cpp on the same file, and what a conversation's cache saves."""
    targets = {
        "1 streams": 1.3,
        "8 streams": 2.0,
        "32 streams": 2.0,
        "ttft 512": 2.0,
        "ttft 2000": 2.0,
        "ttft 8000": 2.0,
    }

    def speed(measured: Record, load: str) -> float:
        found = measured["loads"][load]
        if load.startswith("ttft"):
            return 1 / statistics.median(found["ttft_s"])
        return float(found["decode_tokens_per_s" if load == "decode" else "tokens_per_s"])

    repeats = record["repeats"]
    for model in (name.removesuffix(" penstock") for name in repeats[0] if name.endswith(" penstock")):
        ours = [repeat[f"{model} penstock"] for repeat in repeats]
        theirs = [repeat[f"{model} llama.cpp"] for repeat in repeats if f"{model} llama.cpp" in repeat]
        for load in ours[0]["loads"]:
            target = f"≥ {targets[load]}" if load in targets else ""
            pairs = [speed(our, load) / speed(their, load) for our, their in zip(ours, theirs, strict=False)]
            if pairs:
                yield Figure(f"{model}, {load}: speed to llama.cpp", target, pairs)
        bandwidth = max(best_limits(record)["read_bytes_per_s"].values())
        shares = [record["weight_bytes"][model] / bandwidth * speed(our, "decode") for our in ours]
        yield Figure(f"{model}, decode: share of the limit of memory", "≥ 0.8", shares)
        for name, measured, target in (("penstock", ours, "≥ 10"), ("llama.cpp", theirs, "")):
            saved = [
                statistics.median(one["turns"]["new"]) / statistics.median(one["turns"]["next"]) for one in measured
            ]
            if saved:
                yield Figure(
                    f"{model}, {name}: time to the next turn's first token, faster than new", target, saved, " ×", 1
                )


def start(record: Record) -> Iterator[Figure]:
    """Figures of each installation, then of Penstock relative to each other one, start by start."""
    results = {
        name: [repeat[name] for repeat in record["repeats"] if "error" not in repeat[name]]
        for name in record["servers"]
    }
    programs = {"interpreter": "no import", "torch": "importing torch", "worker": "all of a worker's imports"}
    for name, repeats in results.items():
        yield Figure(f"{name}: start to ready", "", [one["ready_s"] for one in repeats], " s")
        cpu = [one["ready_cpu_s"] for one in repeats]
        yield Figure(f"{name}: processor time of all processes until ready", "", cpu, " s")
        for program, what in programs.items():
            for clock, of in (("wall_s", "time"), ("cpu_s", "processor time")):
                costs = [one["programs"][program][clock] for one in repeats]
                yield Figure(f"{name}: {of} of {what} in a new process", "", costs, " s")
        for when in ("without a standby group", "with the standby group"):
            shares = [beyond_torch(one, when) / record["model"]["file_bytes"] for one in repeats]
            target = "≤ 1.2" if when == "without a standby group" else ""
            yield Figure(f"{name}: memory beyond torch and the KV cache, to the file, {when}", target, shares)
            for part, sizes in columns(dict(parts(one, when)) for one in repeats).items():
                yield Figure(f"{name}: of it {part}, {when}", "", [size / 2**20 for size in sizes], " MiB", 0)
        rates = [one["tokens_per_s"]["at ready"] / one["tokens_per_s"]["later"] for one in repeats]
        yield Figure(f"{name}: speed of a stream while the standby group loads, to later", "≥ 0.9", rates)
    ours, *others = results
    for name in others:
        pairs = [
            repeat[ours]["ready_s"] / repeat[name]["ready_s"]
            for repeat in record["repeats"]
            if not any("error" in repeat[each] for each in (ours, name))
        ]
        yield Figure(f"start to ready, to {name}", "≤ 0.5", pairs)


def contention(record: Record) -> Iterator[Figure]:
    if "prompts" not in record:
        return  # all cells of an older result had the same prompts, which the prefix cache had from the second one on
    num_cores = record["machine"]["num_cores"]
    for weights, by_streams in record["repeats"][0].items():
        for streams, cells in by_streams.items():
            for neighbours in cells:
                if neighbours == "0":
                    continue
                shares = [
                    repeat[weights][streams][neighbours]["tokens_per_s"]
                    / repeat[weights][streams]["0"]["tokens_per_s"]
                    / fair_share(num_cores, int(neighbours))
                    for repeat in record["repeats"]
                ]
                name = f"{weights}, {streams} streams, {neighbours} busy neighbours: throughput to the fair share"
                yield Figure(name, "≥ 0.8", shares)


def lora(record: Record) -> Iterator[Figure]:
    streams, rank = record["load"]["streams"], record["load"]["rank"]
    targets = {"1": ("one adapter", "≥ 0.95"), "8": ("8 adapters", "≥ 0.85")}
    for weights in record["repeats"][0]:
        cells = [{num: cell["tokens_per_s"] for num, cell in repeat[weights].items()} for repeat in record["repeats"]]
        where = f"{weights}, {streams} streams"
        yield Figure(f"{where}: the base alone", "", [cell["0"] for cell in cells], " tokens/s", 0)
        for num, (name, target) in targets.items():
            yield Figure(
                f"{where}: {name} of rank {rank} to the base", target, [cell[num] / cell["0"] for cell in cells]
            )


def images(record: Record) -> Iterator[Figure]:
    repeats = record["repeats"]
    encoded = [[image["encode_s"] for image in repeat["encoded"]] for repeat in repeats]
    yield Figure("encoding an image, nothing else running", "", [statistics.median(each) for each in encoded], " s")
    for num in repeats[0]["ttft_s"]:
        plural = "" if num == "1" else "s"
        for kind, text in (("fresh", "new"), ("again", "sent before")):
            times = [repeat["ttft_s"][num][kind] for repeat in repeats]
            yield Figure(f"TTFT with {num} image{plural}, {text}", "", times, " s")
    gaps = {
        name: [percentile(repeat["loads"][name]["gaps_us"], 0.99) / 1e3 for repeat in repeats]
        for name in ("without", "encoding", "chats")
    }
    names = {"encoding": "while images are encoded", "chats": "while chats with new images are answered"}
    yield Figure("p99 gap of 8 streams without images", "", gaps["without"], " ms", 1)
    for name, text in names.items():
        yield Figure(f"p99 gap of 8 streams {text}", "", gaps[name], " ms", 1)
        ratios = [other / base for other, base in zip(gaps[name], gaps["without"], strict=True)]
        yield Figure(f"the same, to without images ({name})", "≤ 2", ratios)
    different = [float(repeat["num_different"]) for repeat in repeats]
    asked = sum(repeat["num_asked"] for repeat in repeats)
    yield Figure(f"answers in a batch that differ from those alone, of {asked}", "0", different, "", 0, is_count=True)


def fair_share(num_cores: int, num_neighbours: int) -> float:
    """Share of all cores that a server with a thread for each gets, if every busy thread gets the same time."""
    return num_cores / (num_cores + num_neighbours)


def speculation(record: Record) -> Iterator[Figure]:
    """Servers of another model than the embedded one have its name in theirs."""
    kinds = {
        "forced": "drafts of forced tokens",
        "on": "drafts",
        "heads": "drafts of Medusa heads",
        "draft": "drafts of a draft model",
    }
    targets = {"copying": "≥ 2.5", "JSON form": "≥ 1.7", "32 streams": "≥ 0.98"}
    for server, of_server in record["repeats"][0].items():
        ours = server.startswith("penstock")
        for load, modes in of_server["loads"].items():
            cells = [repeat[server]["loads"][load] for repeat in record["repeats"]]
            for mode in (mode for mode in kinds if mode in modes):
                ratios = [cell[mode]["tokens_per_s"] / cell["off"]["tokens_per_s"] for cell in cells]
                target = "≥ 1.3" if (load, mode) == ("free chat", "heads") else targets.get(load, "")
                if not ours or mode in ("draft", "forced") or (mode == "heads" and load in ("copying", "JSON form")):
                    target = ""
                yield Figure(f"{server}, {load}: throughput with {kinds[mode]}, to without", target, ratios)
                drafting = [cell[mode] for cell in cells if cell[mode].get("drafted")]
                if drafting:
                    shares = [100 * cell["accepted"] / cell["drafted"] for cell in drafting]
                    yield Figure(f"{server}, {load}: right {kinds[mode]}", "", shares, " %", 0)
            repeated = [100 * cell["off"]["repeated"] for cell in cells if "repeated" in cell["off"]]
            if repeated:
                yield Figure(f"{server}, {load}: the answers' text that the prompt has", "≥ 80 %", repeated, " %", 0)
        yield from _differences(server, [repeat[server] for repeat in record["repeats"]], kinds, "0" if ours else "")
    for name in (name for name in record if name.startswith("sampled")):
        server, sampled = name.replace("sampled", "penstock"), record[name]
        what = f"answers that differ, of {sampled['requests']:,} requests with every kind of sampling"
        yield Figure(f"{server}: {what}", "0", [sampled["different"]], "", 0, is_count=True)


def _differences(server: str, repeats: Sequence[Record], kinds: dict[str, str], target: str) -> Iterator[Figure]:
    """Answers of one stream that differ from answers without drafts, by drafter if the record names it."""
    cells = [modes for repeat in repeats for modes in repeat["loads"].values()]
    for mode, kind in kinds.items():
        counted = [modes[mode] for modes in cells if "different" in modes.get(mode, {})]
        if counted:
            what = f"answers that {kind} change, of {sum(cell['requests'] for cell in counted)}"
            yield Figure(f"{server}: {what}", target, [cell["different"] for cell in counted], "", 0, is_count=True)
    if not any("different" in cell for modes in cells for cell in modes.values()):
        differences = [repeat["different"] for repeat in repeats]
        yield Figure(f"{server}: answers of these loads that differ", target, differences, "", 0, is_count=True)


def ranks(record: Record) -> Iterator[Figure]:
    for weights, by_streams in record["repeats"][0].items():
        for streams in by_streams:
            cells = [repeat[weights][streams] for repeat in record["repeats"]]
            for num in ("1", "2"):
                name = f"{weights}, {streams} streams: {num} rank(s)"
                yield Figure(name, "", [cell[num] for cell in cells], " tokens/s", 0)
            pairs = [cell["2"] / cell["1"] for cell in cells]
            yield Figure(f"{weights}, {streams} streams: two ranks to one", "≥ 0.9", pairs)
    gathers = record.get("gathers", [])  # older results lack it
    for num_rows in gathers[0] if gathers else ():
        yield Figure(
            f"one gather of {num_rows} row(s)", "≤ 20 µs", [1e6 * each[num_rows] for each in gathers], " µs", 1
        )


def llm(record: Record) -> Iterator[Figure]:
    generated = [repeat["LLM"] for repeat in record["repeats"]]
    yield Figure("LLM.generate", "", generated, " tokens/s", 0)
    for streams in record["repeats"][0]["server"]:
        served = [repeat["server"][streams] for repeat in record["repeats"]]
        yield Figure(f"server, {streams} streams", "", served, " tokens/s", 0)
    pairs = [repeat["LLM"] / max(repeat["server"].values()) for repeat in record["repeats"]]
    yield Figure("LLM.generate to the server at its best load", "≥ 0.97", pairs)


def traces(record: Record) -> Iterator[Figure]:
    repeats, streams = record["repeats"], record["load"]["streams"]

    def router_us(repeat: Record, mode: str) -> float:
        return float(1e6 * repeat[mode]["router_s"] / repeat[mode]["num_tokens"])

    def all_us(repeat: Record) -> float:
        return float(1e6 * repeat["off"]["all_s"] / repeat["off"]["num_tokens"])

    rates = [100 * (repeat["on"]["tokens_per_s"] / repeat["off"]["tokens_per_s"] - 1) for repeat in repeats]
    yield Figure(f"throughput with traces, to without, {streams} streams", "≥ −1 %", rates, " %", 1)
    for mode in ("off", "on"):
        values = [router_us(repeat, mode) for repeat in repeats]
        yield Figure(f"router CPU per token, traces {mode}", "", values, " µs", 2)
    added = [router_us(repeat, "on") - router_us(repeat, "off") for repeat in repeats]
    yield Figure("router CPU per token that traces add", "", added, " µs", 2)
    shares = [100 * more / all_us(repeat) for more, repeat in zip(added, repeats, strict=True)]
    yield Figure("the same, to the CPU time of all processes", "≤ 1 %", shares, " %", 3)
    spans = [repeat["on"]["spans_exported"] / repeat["on"]["num_requests"] for repeat in repeats]
    yield Figure("spans that the collector took, per request", "", spans, "", 1)


def endpoints(record: Record) -> Iterator[Figure]:
    """Figures of both servers with AIPerf's load, on each route that both have."""
    streams = record["load"]["concurrency"]
    for endpoint in dict.fromkeys(endpoint for repeat in record["repeats"] for endpoint in repeat):
        repeats = [repeat[endpoint] for repeat in record["repeats"]]
        for name in repeats[0]:
            points = [repeat[name] for repeat in repeats]
            where = f"{endpoint}, {streams} streams, {name}"
            yield Figure(f"{where}: throughput", "", [point["tokens_per_s"] for point in points], " tokens/s", 0)
            yield Figure(f"{where}: median TTFT", "", [point["ttft"]["p50"] for point in points], " ms", 0)
            yield Figure(f"{where}: failed requests", "0", [point["num_failed"] for point in points], "", 0)
        if len(repeats[0]) == 2:
            ours, other = repeats[0]
            pairs = [repeat[ours]["tokens_per_s"] / repeat[other]["tokens_per_s"] for repeat in repeats]
            yield Figure(f"{endpoint}, {streams} streams: throughput to {other}", "", pairs)


def offload(record: Record) -> Iterator[Figure]:
    """Times of a prompt that comes again: medians over the prompts of a repeat, then the ratios to computing it."""
    names = {
        "computed": "computed again",
        "memory": "from host memory",
        "file": "from a file",
        "pool": "in the KV pool",
    }
    prompt = f"prompt of {record['prompt_tokens']:,} tokens"
    for name, where in names.items():
        times = [statistics.median(repeat[name]["second_s"]) * 1e3 for repeat in record["repeats"]]
        yield Figure(f"{prompt}, {where}: time to first token", "", times, " ms", 1)
    for name, where in list(names.items())[1:]:
        pairs = [
            statistics.median(repeat["computed"]["second_s"]) / statistics.median(repeat[name]["second_s"])
            for repeat in record["repeats"]
        ]
        yield Figure(f"{prompt}, {where}: times faster than computed", "> 1", pairs, "", 1)
    for name in ("memory", "file"):
        pairs = [
            statistics.median(repeat["computed"]["first_s"]) / statistics.median(repeat[name]["first_s"])
            for repeat in record["repeats"]
        ]
        yield Figure(f"{prompt} for the first time, offloading to {name}: speed to without", "", pairs)


def routing(record: Record) -> Iterator[Figure]:
    """Figures of each load and router, then of Penstock relative to the best peer, repeat by repeat."""
    peers = ("sglang-router", "vllm-router")
    for load in record["repeats"][0]:
        repeats = [repeat[load] for repeat in record["repeats"]]
        for name in repeats[0]:
            runs = [repeat[name] for repeat in repeats]
            yield Figure(f"{load}, {name}: hit rate", "", [100 * run["hit_rate"] for run in runs], " %", 1)
            yield Figure(f"{load}, {name}: median TTFT", "", [run["ttft_p50_s"] for run in runs], " s")
            yield Figure(f"{load}, {name}: p99 TTFT", "", [run["ttft_p99_s"] for run in runs], " s")
            yield Figure(f"{load}, {name}: imbalance", "", [run["imbalance"] for run in runs])
            yield Figure(f"{load}, {name}: failed requests", "0", [run["num_errors"] for run in runs], "", 0)
        if {"penstock", *peers} <= repeats[0].keys():
            p99 = [run["penstock"]["ttft_p99_s"] / min(run[peer]["ttft_p99_s"] for peer in peers) for run in repeats]
            hits = [run["penstock"]["hit_rate"] / max(run[peer]["hit_rate"] for peer in peers) for run in repeats]
            yield Figure(f"{load}: hit rate to the better peer", "≥ 1", hits, "", 3)
            yield Figure(f"{load}: p99 TTFT to the better peer", "≤ 0.8", p99)


def routing_simulation(record: Record) -> Iterator[Figure]:
    """Figures of each fleet and policy. A simulation in virtual time gives the same values in every run."""
    for run in record["runs"]:
        slow = f", one of them {run['slowness']:g} times slower" if run["slowness"] > 1 else ""
        where = f"{run['replicas']:,} replicas{slow}, {POLICIES[run['policy']]}"
        share = 100 * run["hit_rate"] / run["hit_rate_optimum"]
        yield Figure(f"{where}: hit rate", "", [100 * run["hit_rate"]], " %", 1, is_count=True)
        name = "the same, to one cache of their size that knows the future"
        yield Figure(f"{where}: {name}", "", [share], " %", 1, is_count=True)
        yield Figure(f"{where}: p99 TTFT", "", [1e3 * run["ttft_p99_s"]], " ms", 1, is_count=True)
        yield Figure(f"{where}: imbalance", "", [run["imbalance"]], is_count=True)
        if run["policy"] == "Prefix":
            name = "blocks that the index remembers, to those of all caches"
            yield Figure(f"{where}: {name}", "≤ 2", [run["index_share"]], is_count=True)


def many_streams(record: Record) -> Iterator[Figure]:
    for cells in zip(*record["repeats"], strict=True):
        where = f"{cells[0]['streams']:,} streams"
        yield Figure(f"router CPU per token, {where}", "", [cell["cpu_us_per_token"] for cell in cells], " µs", 1)
        per_stream = [cell["cpu_us_per_stream"] for cell in cells]
        yield Figure(f"router CPU per stream beside its tokens, {where}", "", per_stream, " µs", 0)
        memory = [cell["bytes_per_stream"] / 1024 for cell in cells]
        yield Figure(f"router memory per stream, {where}", "", memory, " KiB", 1)
        yield Figure(f"failed requests, {where}", "0", [cell["num_errors"] for cell in cells], "", 0, is_count=True)


def long_context(record: Record) -> Iterator[Figure]:
    for name, cell in record["cells"].items():
        shares = [floor_s(cell, repeat["limits"]) / repeat["seconds"][name] for repeat in record["repeats"]]
        yield Figure(f"{name} ({cell['attention']}): share of the machine's limit", "", shares, "", 3)


def floor_s(cell: Record, limits: Record) -> float:
    """The shortest possible time: reading the keys and values once, or computing all products."""
    read_s = cell["kv_bytes"] / max(limits["read_bytes_per_s"].values())
    return float(max(read_s, cell["flop"] / limits["product_flop_per_s"]["bf16"]))


def gpu(record: Record) -> Iterator[Figure]:
    """The targets are those of an H200."""
    targets = {("llama-8b", "1"): "≥ 241", ("llama-8b", "256 × 1,024 / 1,024"): "≥ 9,500"}
    for name, model in record["models"].items():
        repeats = model["repeats"]
        for num in repeats[0]["streams"]:
            steps = [repeat["streams"][num] for repeat in repeats]
            rates = [int(num) / statistics.median(step["step_s"]) for step in steps]
            yield Figure(f"{name}: decode, {num} streams", targets.get((name, num), ""), rates, " tokens/s", 0)
            idle = [100 * step["profile"]["idle_share"] for step in steps if step["profile"]]
            yield Figure(f"{name}: GPU idle, {num} streams", "< 1 %", idle, " %")
        for num in repeats[0]["ttft_s"]:
            times = [repeat["ttft_s"][num] * 1e3 for repeat in repeats]
            yield Figure(f"{name}: time to first token, {int(num):,} tokens", "", times, " ms", 1)
        for batch in repeats[0]["batches"]:
            found = [repeat["batches"][batch] for repeat in repeats]
            rates = [one["output_tokens"] / one["seconds"] for one in found]
            yield Figure(f"{name}: batch of {batch}", targets.get((name, batch), ""), rates, " output tokens/s", 0)
        for which in ("without", "with") if "beside_long_prompt" in repeats[0] else ():
            p99 = [percentile(repeat["beside_long_prompt"][which], 0.99) * 1e3 for repeat in repeats]
            yield Figure(f"{name}: p99 gap of 64 streams {which} a long prompt", "", p99, " ms", 1)


BENCHMARKS: dict[str, Callable[[Record], Iterator[Figure]]] = {
    "compare": compare,
    "compare-partly": compare,
    "latency": latency,
    "overload": overload,
    "multi-turn": multi_turn,
    "run-ahead": run_ahead,
    "step-overhead": step_overhead,
    "quantized": quantized,
    "quantized-avx2": quantized,
    "quality": quantized,
    "start": start,
    "states": states,
    "contention": contention,
    "lora": lora,
    "images": images,
    "speculation": speculation,
    "ranks": ranks,
    "llm": llm,
    "traces": traces,
    "endpoints": endpoints,
    "long-context": long_context,
    "routing": routing,
    "routing-simulation": routing_simulation,
    "many-streams": many_streams,
    "offload": offload,
    "scheduler": scheduler,
    "router": router,
    "grammar": grammar,
    "determinism": determinism,
    "load": load,
    "death": death,
    "chaos": chaos,
    "chaos-replicas": chaos,
    "soak": soak,
    "simulation": simulation,
    "gpu": gpu,
}
