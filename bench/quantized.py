"""Compares quantized weights: Penstock and llama.cpp on the same GGUF file under the loads of compare.py and prompts of
2,000 tokens, Penstock in bf16 beside them, and what quantization costs in quality, with inputs of 8 and of 16 bits.
llama.cpp is built without its products for AMX, which crash on these files.

llama.cpp's own tool makes the files of the other types from the embedded model's bf16 weights. Quality is measured on
real text, the topics of Python's manual, against the same weights dequantized: perplexity, the Kullback-Leibler
divergence of the predictions, and the share of tokens that both would choose. As a scale, the weights of each file that
llama.cpp made, dequantized, are compared with those that it was made from: the loss of the format itself.
`--quality-only` measures nothing else, of the chosen models: also of Gemma 3 270M, as its file stores it (Q4_K_M).
"""

from __future__ import annotations

import itertools
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
from compare import (
    Measure,
    Server,
    exit_on_errors,
    in_own_process,
    llama_server,
    loads_of,
    measure,
    measure_all,
    penstock_server,
)
from load import Load
from result import heading, keep, machine, option_parser, title
from table import markdown

GEMMA = "Gemma 3 270M"
TYPES = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
STREAMS = (1, 8, 32)
LONG_PROMPT = Load("ttft 2000", 1, 3, 2000, 4)
SLOT_TOKENS = 2048  # tokens of the peer's KV cache per stream
INPUT_BITS = (8, 16)
NUM_TEXTS, TEXT_TOKENS = 16, 512
LOADS = [*loads_of(STREAMS, quick=False), LONG_PROMPT]


def gguf_of(kind: str) -> Path:
    """The embedded model's file, or one that llama.cpp quantizes once."""
    if kind == "Q4_1":
        return peers.embedded_gguf()
    target = peers.PEERS / peers.bf16_gguf().name.replace("BF16", kind)
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        subprocess.run(
            [str(peers.build_llama("llama-quantize")), str(peers.bf16_gguf()), str(unfinished), kind], check=True
        )
        unfinished.rename(target)
    return target


def texts(folder: Path) -> list[list[int]]:
    """Tokens of real text, without those that every text has in common."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False).ids
    step, begin = len(ids) // NUM_TEXTS, tokenizer.encode("").ids
    return [(begin + ids[first : first + TEXT_TOKENS])[:TEXT_TOKENS] for first in range(0, NUM_TEXTS * step, step)]


def logits(path: Path, *, dequantize: bool = False, **options: Any) -> Iterator[Any]:
    """Logits [tokens, vocabulary] of a model for each text, float32. options: arguments of `LoadOptions`."""
    import torch
    from penstock_server.device.attention import preferred_block_tokens
    from penstock_server.device.attention.interface import StepBatch
    from penstock_server.models import load_model
    from penstock_server.models.interface import LoadOptions
    from penstock_server.parallel import RankGroup
    from penstock_server.weights.gguf.folder import gguf_folder

    folder = gguf_folder(path)
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    block_tokens = preferred_block_tokens(cpu, dtype)
    loaded = LoadOptions(folder, dtype, cpu, block_tokens, dequantize=dequantize, **options)
    model = load_model(loaded, RankGroup())
    num_blocks = -(-TEXT_TOKENS // block_tokens)
    model.allocate_cache(num_blocks)
    for ids in texts(folder):
        rows = torch.arange(len(ids))
        batch = StepBatch(
            token_ids=torch.tensor(ids),
            positions=rows,
            slots=rows,
            query_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
            context_lens=torch.tensor([len(ids)], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            sample_rows=rows,
            max_query_tokens=len(ids),
            max_context_tokens=len(ids),
        )
        with torch.inference_mode():
            found = model.logits(model.forward(batch))
        assert found is not None
        yield found.float()


def quality(texts: list[list[int]], of: Iterator[Any], reference: Iterator[Any]) -> dict[str, list[float]]:
    """Measures by text: the mean negative log probability of a model and of the dense one, the mean divergence of their
    predictions in nats, and the share of tokens with the same first choice."""
    import torch

    rows: dict[str, list[float]] = {"nll": [], "nll_dense": [], "divergence": [], "agreement": []}
    for ids, found, dense in zip(texts, of, reference, strict=True):
        following = torch.tensor(ids[1:])[:, None]
        quantized, exact = found.log_softmax(-1)[:-1], dense.log_softmax(-1)[:-1]
        rows["nll"].append(-quantized.gather(1, following).mean().item())
        rows["nll_dense"].append(-exact.gather(1, following).mean().item())
        rows["divergence"].append((exact.exp() * (exact - quantized)).sum(-1).mean().item())
        rows["agreement"].append((quantized.argmax(-1) == exact.argmax(-1)).float().mean().item())
    return rows


def qualities(kinds: list[str]) -> dict[str, dict[str, list[float]]]:
    """Qualities of all weights with each number of input bits, and of the formats themselves."""
    from penstock_server.weights.gguf.folder import gguf_folder

    source, found = peers.bf16_gguf(), {}
    ids = texts(gguf_folder(source))
    for kind in kinds:
        path = gguf_of(kind)
        for bits in INPUT_BITS:
            quantized = logits(path, activation_bits=bits)
            found[f"{kind}, inputs of {bits} bits"] = quality(ids, quantized, logits(path, dequantize=True))
        if kind != "Q4_1":  # the source is made of it
            found[f"the format {kind}"] = quality(ids, logits(path, dequantize=True), logits(source))
    for bits in INPUT_BITS:
        quantized = logits(source, quantize="eetq", activation_bits=bits)
        found[f"8 bits at load, inputs of {bits} bits"] = quality(ids, quantized, logits(source))
    return found


def quality_of_gemma(num_texts: int) -> dict[str, dict[str, list[float]]]:
    from penstock_server.weights.gguf.folder import gguf_folder

    path = peers.gemma_gguf()
    ids = texts(gguf_folder(path))[:num_texts]
    return {
        f"{GEMMA} Q4_K_M, inputs of {bits} bits": quality(
            ids,
            itertools.islice(logits(path, activation_bits=bits), num_texts),
            itertools.islice(logits(path, dequantize=True), num_texts),
        )
        for bits in INPUT_BITS
    }


def weight_bytes(kind: str) -> int:
    """Bytes of all tensors in a file. A decode step reads them all, because the head of this model is its embedding."""
    from gguf import GGUFReader

    path = peers.bf16_gguf() if kind == "bf16" else gguf_of(kind)
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def servers_of(kinds: list[str], input_bits: Sequence[int], isa: str, *, with_peer: bool) -> dict[str, Server]:
    """The servers by name. isa: what both use; empty: all that this machine has, and llama.cpp in bf16 is left out,
    because compare.py measures it."""
    chosen = ["--cpu-isa", isa] if isa else []

    def peer(path: Path, kind: str) -> Server:
        server = llama_server("llama.cpp", path, max(STREAMS), [], isa, SLOT_TOKENS)
        return replace(server, weights=kind.lower())

    found = {"penstock bf16": penstock_server(chosen)}
    if with_peer and isa:
        found["llama.cpp bf16"] = peer(peers.bf16_gguf(), "bf16")
    for kind in kinds:
        path = gguf_of(kind)
        for bits in input_bits:
            flags = ["--model-id", str(path), "--activation-bits", str(bits), *chosen]
            ours = penstock_server(flags, dequantize=False)
            found[f"penstock {kind}, inputs of {bits} bits"] = replace(ours, weights=kind.lower())
        if with_peer:
            found[f"llama.cpp {kind}"] = peer(path, kind)
    return found


def report(record: dict[str, Any]) -> str:
    loads = [load.name for load in LOADS]
    rows = []
    for name in record["repeats"][0] if record["repeats"] else ():
        cells = []
        for load in loads:
            is_time = load.startswith("ttft")
            key = "ttft_s" if is_time else "decode_tokens_per_s" if load == "decode" else "tokens_per_s"
            results = [repeat[name]["loads"][load][key] for repeat in record["repeats"] if "error" not in repeat[name]]
            values = [statistics.median(result) if is_time else result for result in results]
            middle = statistics.median(values) if values else math.nan
            cells.append(f"{middle * 1e3:.0f} ms" if is_time else f"{middle:.0f}")
        rows.append([name, *cells])
    isa = f"Instruction set of both servers: {record['cpu_isa']}.\n\n" if record["cpu_isa"] else ""
    text = title(record) + isa + (markdown(["server", *loads], rows) if rows else "")
    if not record["quality"]:
        return text
    rows = []
    for kind, found in record["quality"].items():
        means = {key: sum(values) / len(values) for key, values in found.items()}
        change = math.exp(means["nll"] - means["nll_dense"]) - 1
        rows.append([kind, f"{change:+.2%}", f"{means['divergence']:.4f}", f"{means['agreement']:.1%}"])
    header = ["weights", "perplexity, to what they stand for", "divergence (nats)", "same first choice"]
    return f"{text}\n{markdown(header, rows)}"


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--only", nargs="+", choices=("penstock", "llama.cpp"), default=["penstock", "llama.cpp"])
    parser.add_argument(
        "--input-bits", type=int, nargs="+", choices=INPUT_BITS, default=[8], help="of the timed servers"
    )
    parser.add_argument("--quality-only", action="store_true", help="as a result of its own")
    parser.add_argument(
        "--gemma-texts", type=int, default=NUM_TEXTS, help="of how many texts Gemma's quality is a mean"
    )
    parser.add_argument(
        "--models", nargs="+", choices=("smollm2", "gemma"), default=["smollm2"], help="whose quality is measured"
    )
    parser.add_argument(
        "--cpu-isa",
        choices=sorted(peers.LLAMA_ISAS),
        default="",
        help="of both servers, without quality, as a result of its own; default: all that this machine has",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped
    record: dict[str, Any] = {**heading(), "machine": machine(), "cpu_isa": options.cpu_isa, "repeats": []}
    record["quality"] = {} if options.cpu_isa or "smollm2" not in options.models else qualities(options.types)
    if options.quality_only and "gemma" in options.models:
        record["quality"] |= quality_of_gemma(options.gemma_texts)
    if not options.quality_only:
        record["limits"] = in_own_process("limits.py")
        record["weight_bytes"] = {kind: weight_bytes(kind) for kind in ("bf16", *options.types)}
        words, with_peer = peers.prompt_words(), "llama.cpp" in options.only
        servers = servers_of(options.types, options.input_bits, options.cpu_isa, with_peer=with_peer)
        measures: dict[str, Measure] = {
            name: lambda seed, server=server: measure(server, LOADS, words, seed) for name, server in servers.items()
        }
        record["repeats"] = [measure_all(measures, repeat) for repeat in range(options.repeats)]
    name = "quality" if options.quality_only else "-".join(filter(None, ("quantized", options.cpu_isa)))
    keep(record, name, report(record), options.out)
    exit_on_errors(record)


if __name__ == "__main__":
    main()
