"""Runs the faults of integration-tests/test_chaos.py in any number, against the real binary with the embedded model.

    .venv/bin/python bench/chaos.py --targets server --kills 1000 --cancels 10000 --malformed 10000
    .venv/bin/python bench/chaos.py --targets replicas mock-replicas --replica-kills 500 --drains 500

The workers of mock replicas are those of bench/worker, whose tokens depend on all tokens before them as the KV blocks
hold them. A drain takes seconds, because the router reads its list each second. Everything except timing is a function
of the seed. The raw result is written after every piece of work, and `--resume` continues from it. Exit status 1: an
answer changed, or a resource was not released.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers
from load import percentile
from result import ROOT, beside, heading, machine, new_path, option_parser, read, revision, save
from router_cost import build_worker, script, word_tokens

sys.path.insert(0, str(ROOT / "integration-tests"))

from binary import Server, start
from fault import mix, slow
from fault.cancel import cancel, leaves_nothing_behind
from fault.drain import drain_servers, routed
from fault.kill import kill_workers
from fault.malformed import malform
from fault.probe import Footprint, footprint, replica_workers, wait_for_rest, wait_until
from fault.soak import Soak, soak

NUM_PERMITS = 64
# Just enough for the request mix, because every worker touches its whole pool before it serves.
SMALL_POOL = ("--max-batch-total-tokens", "8192")
LIMITS = ("--max-concurrent-requests", str(NUM_PERMITS), "--max-batch-size", "12", "--max-total-tokens", "1024")
PIECES = {
    "kills, 1 rank": 20,
    "kills, 2 ranks": 20,
    "kills, 2 replicas": 20,
    "drains": 20,
    "kills, 4 mock replicas": 50,
    "drains, 4 mock replicas": 50,
    "cancels": 500,
    "malformed": 500,
}
NUM_SLOW_READERS = 16
TARGETS = ("server", "replicas", "mock-replicas")
Part = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """Replicas that are killed and drained."""

    kills: str = "kills, 2 replicas"  # names of parts
    drains: str = "drains"
    num_replicas: int = 2
    flags: Sequence[str] = SMALL_POOL
    environment: Mapping[str, str] = field(default_factory=dict)


def mock_fleet(folder: Path) -> Fleet:
    """Replicas with mock workers, whose pools are too small for the request mix: sequences are preempted."""
    environment = script(build_worker(), folder, word_tokens(peers.prompt_words()))
    environment |= {"SCRIPT_STEP_MICROSECONDS": "4000", "SCRIPT_NUM_BLOCKS": "48"}
    flags = ("--max-total-tokens", "640")
    return Fleet("kills, 4 mock replicas", "drains, 4 mock replicas", 4, flags, environment)


@contextmanager
def serving(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = start(*arguments, env=dict(env or {}))
    try:
        yield server
    finally:
        status = server.stop()
    if status != 0:
        raise SystemExit(f"error: the server ended with {status}:\n" + "\n".join(server.lines[-20:]))


class Run:
    """The raw result, written to disk after every piece of work."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record, self.revision = path, record, revision()

    def part(self, name: str) -> Part:
        empty = {"done": 0, "revisions": [], "differences": [], "wrong": [], "seconds": 0.0}
        part: Part = self.record["parts"].setdefault(name, empty)
        return part

    def save(self, part: Part) -> None:
        """Write the result, including the progress of this part."""
        # `--resume` may continue at a different commit.
        if self.revision not in part["revisions"]:
            part["revisions"].append(self.revision)
        save(self.record, self.path)

    def pieces(self, name: str, wanted: int) -> Iterator[tuple[Part, int, str]]:
        """Yields (part, count, seed) until `wanted` are done; each piece is saved when the next one is requested."""
        part = self.part(name)
        while part["done"] < wanted:
            num = min(PIECES[name], wanted - part["done"])
            began = time.monotonic()
            yield part, num, f"{self.record['seed']}/{name}/{part['done']}"
            part["done"] += num
            part["seconds"] += time.monotonic() - began
            self.save(part)
            bad = len(part["differences"]) + len(part["wrong"])
            print(f"  {name}: {part['done']} of {wanted}, {part['seconds']:.0f} s, {bad} wrong", flush=True)

    def add(self, part: Part, **numbers: float) -> None:
        for key, value in numbers.items():
            part[key] = part.get(key, 0) + value

    def is_good(self) -> bool:
        return not any(part["differences"] or part["wrong"] for part in self.record["parts"].values())


def undisturbed(server: Server, asked: Sequence[mix.Request]) -> list[mix.Answer]:
    """The answers without faults. Raises SystemExit when two runs of them differ."""
    found, again = mix.answers(server, asked), mix.answers(server, asked)
    if found != again:
        raise SystemExit("error: the answers differ between two runs without any fault")
    return found


def run_kills(run: Run, asked: Sequence[mix.Request], num_ranks: int, wanted: int) -> None:
    name = f"kills, {num_ranks} rank{'s' * (num_ranks > 1)}"
    if run.part(name)["done"] >= wanted:
        return
    with serving("--num-shard", str(num_ranks), *SMALL_POOL) as server:
        expected = undisturbed(server, asked)
        for part, num, seed in run.pieces(name, wanted):
            kills = kill_workers(server, asked, expected, num, seed)
            part["differences"] += kills.differences
            run.add(part, answers=kills.num_answers, restarts=kills.num_restarts, downtime_s=kills.downtime_s)
            part.setdefault("footprints", []).append(footprint(server).as_dict())


def run_replica_kills(run: Run, asked: Sequence[mix.Request], wanted: int, fleet: Fleet) -> None:
    if run.part(fleet.kills)["done"] >= wanted:
        return
    with serving("--replicas", str(fleet.num_replicas), *fleet.flags, env=fleet.environment) as server:
        expected = undisturbed(server, asked)
        for part, num, seed in run.pieces(fleet.kills, wanted):
            kills = kill_workers(server, asked, expected, num, seed, replica_workers)
            part["differences"] += kills.differences
            run.add(part, answers=kills.num_answers, restarts=kills.num_restarts, downtime_s=kills.downtime_s)


def run_drains(run: Run, asked: Sequence[mix.Request], wanted: int, fleet: Fleet) -> None:
    """Servers behind a router; one of them leaves its list and joins it again."""
    if run.part(fleet.drains)["done"] >= wanted:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        routed(Path(folder), fleet.num_replicas, *fleet.flags, env=fleet.environment) as (router, servers),
    ):
        expected = undisturbed(router, asked)
        for part, num, seed in run.pieces(fleet.drains, wanted):
            drains = drain_servers(router, servers, asked, expected, num, seed)
            part["differences"] += drains.differences
            run.add(part, answers=drains.num_answers, handovers=drains.num_handovers)


def run_clients(run: Run, asked: Sequence[mix.Request], num_cancels: int, num_malformed: int) -> None:
    with serving(*LIMITS) as server:
        expected = undisturbed(server, asked)
        for part, num, seed in run.pieces("cancels", num_cancels):
            with leaves_nothing_behind(server, NUM_PERMITS):
                cancels = cancel(server, num, seed)
            if mix.answers(server, asked) != expected:
                part["differences"].append(f"after the piece with seed {seed}")
            part["moments"] = dict(Counter(part.get("moments", {})) + cancels.moments)
        for part, num, seed in run.pieces("malformed", num_malformed):
            with leaves_nothing_behind(server, NUM_PERMITS):
                malformed = malform(server, asked, expected, num, seed)
            part["differences"] += malformed.differences
            part["wrong"] += malformed.wrong
            part["statuses"] = dict(Counter(part.get("statuses", {})) + malformed.statuses)
            run.add(part, answers=malformed.num_answers)


def run_soak(run: Run, asked: Sequence[mix.Request], minutes: float) -> None:
    """Cannot be resumed: an interrupted soak starts over."""
    part = run.part("soak")
    if part["done"] >= minutes or minutes == 0:
        return
    with serving(*LIMITS) as server:
        expected = undisturbed(server, asked)
        before = footprint(server)

        def report(now: Footprint) -> None:
            print(
                f"  soak: router {now.router_pss_bytes >> 10} KiB, workers {now.workers_pss_bytes >> 10} KiB",
                flush=True,
            )

        seed = str(run.record["seed"])
        soaked = soak(server, asked, expected, minutes * 60, seed, max(12, int(minutes * 4)), report)
        seconds = round(soaked.seconds)
        wait_until(
            lambda: footprint(server).router_threads <= before.router_threads,
            "the router has as many threads as before",
        )
        part.update(done=minutes, seconds=seconds, answers=soaked.num_answers, cancels=soaked.num_cancels)
        part.update(differences=soaked.differences, before=before.as_dict(), after=footprint(server).as_dict())
        part.update(samples=soaked.samples, slopes=slopes_of(soaked))
    run.save(part)


def slopes_of(soaked: Soak) -> dict[str, Any]:
    return {name: asdict(slope) for name, slope in soaked.slopes().items()}


def run_slow(run: Run, asked: Sequence[mix.Request], num_pairs: int) -> None:
    """Time of the request mix with and without slow readers, alternating, and the router's memory."""
    part = run.part("slow readers")
    if part["done"] >= num_pairs:
        return
    with serving("--max-concurrent-requests", str(NUM_PERMITS)) as server:
        expected = undisturbed(server, asked)
        times: dict[str, list[float]] = {"without": [], "beside": []}
        before, most = footprint(server), 0

        def timed(name: str) -> None:
            began = time.monotonic()
            if mix.answers(server, asked) != expected:
                part["differences"].append(name)
            times[name].append(time.monotonic() - began)

        for _ in range(num_pairs):
            # New ones each time: the server disconnects them after a while.
            with slow.slow_readers(server, NUM_SLOW_READERS):
                wait_for_rest(server)  # their answers are complete and wait to be read
                most = max(most, footprint(server).router_pss_bytes)
                timed("beside")
            wait_for_rest(server)
            timed("without")
        ratios = [beside / without for beside, without in zip(times["beside"], times["without"], strict=True)]
        ratio = percentile(ratios, 0.5)
        grown = (most - before.router_pss_bytes) / NUM_SLOW_READERS
        part.update(done=num_pairs, times_s=times, ratio=ratio, router_bytes_per_slow_reader=grown)
        print(f"  slow readers: {ratio:.3f} of the time, {grown / 1024:.0f} KiB each", flush=True)
    run.save(part)


def new_record(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **heading(),
        "machine": machine(),
        "seed": options.seed,
        "tokens": options.tokens,
        "parts": {},
    }


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["server", "replicas"])
    parser.add_argument("--kills", type=int, default=20, help="in total; half of them with two ranks")
    parser.add_argument("--replica-kills", type=int, default=20, help="of the workers of replicas")
    parser.add_argument("--drains", type=int, default=20, help="removals of a server from a router's list")
    parser.add_argument("--cancels", type=int, default=250)
    parser.add_argument("--malformed", type=int, default=500)
    parser.add_argument("--soak-minutes", type=float, default=2.0)
    parser.add_argument("--slow-pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="per stream of the request mix")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--resume", type=Path, metavar="RAW", help="continue this raw result")
    options = parser.parse_args()
    if options.resume:
        record = read(options.resume)
        options.seed, options.tokens = record["seed"], record["tokens"]
        run = Run(options.resume, record)
    else:
        record = new_record(options)
        name = "chaos" if "server" in options.targets else "chaos-replicas"
        run = Run(new_path(record, name, options.out), record)
    asked = mix.requests(options.tokens)
    print(f"raw: {run.path}", flush=True)
    if "server" in options.targets:
        run_kills(run, asked, 1, options.kills - options.kills // 2)
        run_kills(run, asked, 2, options.kills // 2)
        run_clients(run, asked, options.cancels, options.malformed)
        run_soak(run, asked, options.soak_minutes)
        run_slow(run, asked, options.slow_pairs)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        fleets = {"replicas": Fleet, "mock-replicas": lambda: mock_fleet(Path(folder))}
        for fleet in (fleets[name]() for name in fleets if name in options.targets):
            run_replica_kills(run, asked, options.replica_kills, fleet)
            run_drains(run, asked, options.drains, fleet)
    text = summary(run.record)
    beside(run.path, ".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nraw: {run.path}")
    if not run.is_good():
        raise SystemExit(1)


def summary(record: dict[str, Any]) -> str:
    lines = [f"{record['started']}, `{record['command']}`, {record['revision']}", ""]
    for name, part in record["parts"].items():
        if not part["done"]:
            continue  # not requested
        bad = len(part["differences"]) + len(part["wrong"])
        line = f"- {name}: {part['done']}, {part.get('answers', 0)} answers compared, {bad} wrong"
        if "ratio" in part:
            line = f"- {name}: {part['done']} pairs, {part['ratio']:.3f} of the time without them, {bad} wrong"
        if "handovers" in part:
            line += f", {part['handovers']} handovers"
        if part.get("restarts"):
            line += f", {part['restarts']} restarts of {part['downtime_s'] / part['restarts']:.2f} s in the mean"
        lines.append(line)
        for what, slope in part.get("slopes", {}).items():
            lines.append(
                f"  - {what}: {slope['per_hour']:.4g} ± {slope['error_per_hour']:.2g} an hour, of {slope['mean']:.4g}"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
