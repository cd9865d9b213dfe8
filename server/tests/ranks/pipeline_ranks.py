"""A script of steps over disjoint sequences, and the stages of a pipeline as threads that run it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier

import torch
from penstock_server.collectives.distributed import Distributed
from penstock_server.engine import Engine
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup, Stage
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Plan, Sampling
from plans import Advance, Output, columns, outputs
from rank_threads import ThreadGroup
from tiny_models import prompts
from torch import Tensor

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
LIMITS = WarmUpConfig(max_step_tokens=64, max_step_sequences=8, max_sequence_tokens=64, num_blocks=40)
SAMPLINGS = {
    1: Sampling(),
    2: Sampling(do_sample=True, seed=5, temperature=3.0, repetition_penalty=1.2),
    3: Sampling(prompt_logprobs=True, top_n=2, model_logprobs=True),
}

Run = Callable[[Plan], list[Output]]


def run_script(run: Run, vocab_size: int, num_rounds: int = 4) -> list[list[Output]]:
    """Steps with a chunk of a prompt, and then decodes of sequence 1 and of the others in turn. Returns the outputs of
    each step."""
    known = dict(zip(SAMPLINGS, prompts(7, [19, 33, 5], vocab_size), strict=True))
    results: list[list[Output]] = []

    def step(advances: list[Advance], new_ids: tuple[int, ...] = ()) -> None:
        new = [NewSequence(i, list(known[i]), len(known[i]), sampling=SAMPLINGS[i]) for i in new_ids]
        last = [known[advance.sequence_id][-1] for advance in advances]
        listed = replace(columns(advances), last_token_ids=torch.tensor(last).numpy().astype("uint32"))
        results.append(run(Plan(len(results) + 1, new_sequences=new, advances=listed)))
        for output in results[-1]:
            known[output.sequence_id] += [token.id for token in output.tokens]

    blocks = {i: range(4 * i, 4 * i + 4) for i in SAMPLINGS}
    step([Advance(1, 19, blocks[1], sample=True), Advance(2, 16, blocks[2])], (1, 2))
    step([Advance(2, 17, sample=True), Advance(3, 5, blocks[3], sample=True)], (3,))
    for _ in range(num_rounds):
        step([Advance(1, 1, sample=True)])
        step([Advance(2, 1, sample=True), Advance(3, 1, sample=True)])
    return results


def loaded_engine(options: LoadOptions, group: RankGroup) -> Engine:
    engine = Engine(load_model(options, group), group, CPU, BLOCK_TOKENS)
    engine.warm_up(LIMITS)
    return engine


@dataclass
class Recorder:
    """Runs plans on an engine and keeps them."""

    engine: Engine
    plans: list[Plan] = field(default_factory=list)

    def __call__(self, plan: Plan) -> list[Output]:
        self.plans.append(plan)
        return outputs(self.engine.step(plan), plan)


class Link(Distributed):
    """One side of a pair of ranks: what the first one sends waits in a queue."""

    def __init__(self, queue: SimpleQueue[Tensor], *, sends: bool) -> None:
        super().__init__()
        self._queue, self._sends = queue, sends

    def broadcast(self, x: Tensor) -> Tensor:
        if not self._sends:
            return x.copy_(self._queue.get(timeout=60))
        self._queue.put(x.clone())
        return x


def run_stages(
    options: LoadOptions, num_stages: int, num_shards: int, plans: list[Plan]
) -> tuple[list[list[Output]], list[Engine]]:
    """What rank 0 returns for each plan, and the engines of all ranks, in the order of their ranks."""
    size = num_stages * num_shards
    barriers = [Barrier(num_shards, timeout=60) for _ in range(num_stages)]
    tables: list[list[Tensor | None]] = [[None] * num_shards for _ in range(num_stages)]
    everyone, of_all = Barrier(size, timeout=60), [None] * size
    queues: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in range(size)]  # by the rank that receives

    def run(rank: int) -> tuple[list[list[Output]], Engine]:
        index, shard = num_stages - 1 - rank // num_shards, rank % num_shards
        stage = Stage(
            index,
            num_stages,
            Link(queues[rank], sends=False),
            Link(queues[rank - num_shards], sends=True),
            ThreadGroup(rank, size, barrier=everyone, table=of_all),  # type: ignore[arg-type]
        )
        group = ThreadGroup(shard, num_shards, stage=stage, barrier=barriers[index], table=tables[index])
        engine = loaded_engine(options, group)
        return [outputs(engine.step(plan), plan) for plan in plans], engine

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    return found[0][0], [engine for _, engine in found]


def options_of(folder: Path, dtype: torch.dtype) -> LoadOptions:
    return LoadOptions(folder, dtype, CPU, BLOCK_TOKENS)
