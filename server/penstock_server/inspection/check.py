"""`python -m penstock_server.inspection.check [MODEL]`: describes a model, how it would be served here, and every
problem.

Starts no server and loads no weights. Exits with status 0 when the model can be served, else 1. `penstock check` runs
this.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from penstock_server.inspection.files import ModelFiles
from penstock_server.inspection.reference import find_model
from penstock_server.inspection.sampling import described, inspect_sampling
from penstock_server.inspection.text import TextFacts, inspect_text

MEMORY_FRACTION = 0.9  # as --cuda-memory-fraction


@dataclass(frozen=True, slots=True)
class Report:
    """The facts about one model. layout: an `inspection.layout.Layout`, or None."""

    files: ModelFiles
    text: TextFacts
    layout: Any

    @property
    def num_parameters(self) -> int | None:
        tensors = self.files.tensors
        return None if tensors is None else sum(math.prod(tensor.shape) for tensor in tensors.values())

    @property
    def stored_as(self) -> dict[str, int]:
        """The number of tensors of each type."""
        return dict(Counter(tensor.dtype for tensor in (self.files.tensors or {}).values()).most_common())


def check(
    model_id: str | None,
    revision: str | None,
    num_ranks: int,
    dtype: str,
    memory_fraction: float,
    *,
    num_stages: int = 1,
    deterministic: bool = False,
    trust_remote_code: bool = False,
) -> Report:
    """Inspects a model. Its problems are in the report and raise no errors. num_ranks: of each of the pipeline's
    stages. trust_remote_code: the model's own Python code may be fetched and run."""
    files = find_model(model_id, revision, with_code=trust_remote_code)
    text, layout = TextFacts(), None
    if files.folder is not None and any(files.folder.iterdir()):
        text = inspect_text(files.folder, files.problems, files.notes)
        # Importing torch takes seconds, so only when it is needed.
        if (files.folder / "config.json").is_file():
            from penstock_server.inspection.layout import lay_out

            layout = lay_out(
                files,
                files.folder,
                num_ranks,
                dtype,
                memory_fraction,
                num_stages=num_stages,
                deterministic=deterministic,
                trust_remote_code=trust_remote_code,
            )
            if layout is not None and (text.num_tokens or 0) > layout.vocab_size:
                files.notes.append(
                    f"the tokenizer has {text.num_tokens} tokens, but the model has {layout.vocab_size} embeddings: "
                    "texts with the others are refused"
                )
        else:
            files.problems.append(f"{files.folder} holds no config.json, so it is not a model folder")
        if layout is None or layout.serves == "generation":
            text.sampling_defaults = inspect_sampling(files.folder, files.notes)
    return Report(files, text, layout)


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    files = report.files
    return {
        "model": files.name,
        "origin": files.origin,
        "servable": not files.problems,
        "problems": files.problems,
        "notes": files.notes,
        "weights": {"kind": files.kind, "files": files.sizes, "bytes": sum(files.sizes.values())},
        "num_parameters": report.num_parameters,
        "stored_as": report.stored_as,
        "text": asdict(report.text),
        "layout": None if report.layout is None else asdict(report.layout),
    }


def as_text(report: Report) -> str:
    """The report for people."""
    files, text, layout = report.files, report.text, report.layout
    rows = [("model", files.name), ("origin", files.origin)]
    if layout is not None:
        rows.append(("architecture", layout.architecture))
        rows.append(("serves", layout.serves))
        rows.append(("images", "read" if layout.reads_images else "not read"))
        of_source = f", of which {layout.max_source_tokens} for the source" if layout.max_source_tokens else ""
        longest, default = layout.max_position_tokens, layout.default_position_tokens or layout.max_position_tokens
        more = f"; up to {longest} with --max-total-tokens" if default < longest else ""
        rows.append(("context", f"{default} tokens{of_source}{more}"))
    if report.num_parameters is not None:
        rows.append(("parameters", f"{report.num_parameters:,}"))
        rows.append(("stored as", ", ".join(f"{name} ({num} tensors)" for name, num in report.stored_as.items())))
    if files.sizes:
        total = sum(files.sizes.values())
        rows.append(("weights", f"{len(files.sizes)} {files.kind} file(s), {_size(total)}"))
        rows += [("", f"{name}  {_size(size)}") for name, size in list(files.sizes.items())[:8]]
        if len(files.sizes) > 8:
            rows.append(("", f"and {len(files.sizes) - 8} more"))
    if text.tokenizer is not None:
        rows.append(("tokenizer", f"{text.tokenizer}, {text.num_tokens} tokens"))
    if files.folder is not None:
        rows.append(("chat template", text.chat_template or "none"))
    if text.eos_token_ids:
        rows.append(("EOS tokens", ", ".join(map(str, text.eos_token_ids))))
    if text.sampling_defaults:
        rows.append(("sampling", f"{described(text.sampling_defaults)}, except on TGI's routes"))
    if layout is not None:
        if layout.quantization:
            rows.append(("quantization", layout.quantization))
        rows.append(("computed in", f"{layout.dtype} on {layout.device}, {len(layout.ranks)} rank(s)"))
        for number, rank in enumerate(layout.ranks):
            layers = f"layers {rank.first_layer} to {rank.first_layer + rank.num_layers - 1}"
            heads = f"{rank.num_heads} heads, {rank.num_kv_heads} KV heads"
            rows.append((f"rank {number}", f"{layers}, {heads}"))
            rows.append(("", f"weights {_size(rank.weight_bytes)}, KV cache {rank.kv_bytes_per_token} bytes per token"))
            if rank.state_bytes:
                states = f"{_size(rank.state_bytes)} for each running sequence"
                rows.append(("", f"states {states}, a snapshot {_size(rank.snapshot_bytes)}"))
            rows.append(("", f"{rank.fitting_tokens} tokens fit now ({_size(rank.free_bytes)} free)"))
        rows.append(("KV cache", f"at most {min(rank.fitting_tokens for rank in layout.ranks)} tokens"))
    rows += [("note", note) for note in files.notes]
    rows += [("problem", problem) for problem in files.problems]
    rows.append(("verdict", "cannot be served" if files.problems else "can be served"))
    return "\n".join(f"{name:<14} {value}".rstrip() for name, value in rows)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock check", description="Describe a model and whether it can be served."
    )
    parser.add_argument("model", nargs="?", help="model folder, .gguf file or hub id; without it the embedded model")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--num-shard", type=int, default=1, help="number of ranks (default 1)")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="number of pipeline stages (default 1)")
    parser.add_argument("--dtype", default="", help="float32, float16 or bfloat16 (default: the server's choice)")
    parser.add_argument(
        "--cuda-memory-fraction", type=float, default=MEMORY_FRACTION, help="fraction of memory to use (default 0.9)"
    )
    parser.add_argument("--deterministic", action="store_true", help="as the server's flag")
    parser.add_argument("--trust-remote-code", action="store_true", help="as the server's flag")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name, value in [
        ("num-shard", options.num_shard),
        ("pipeline-parallel-size", options.pipeline_parallel_size),
    ]:
        if value < 1:
            parser.error(f"--{name} is {value}, must be at least 1")
    report = check(
        options.model,
        options.revision,
        options.num_shard,
        options.dtype,
        options.cuda_memory_fraction,
        num_stages=options.pipeline_parallel_size,
        deterministic=options.deterministic,
        trust_remote_code=options.trust_remote_code,
    )
    print(json.dumps(as_json(report), indent=1) if options.json else as_text(report))
    return 1 if report.files.problems else 0


if __name__ == "__main__":
    sys.exit(main())
