"""Compiles the Triton kernels for GPUs that are not there, and prints their resources as JSON.

Runs in a process of its own, because `TRITON_INTERPRET` decides at import whether kernels are compiled. Arguments: the
compute capabilities, then the names of CASES. Each line of the output is one compiled kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from penstock_server.device.activation import Xielu
from penstock_server.device.attention.interface import (
    Alibi,
    AttentionMask,
    AttentionShape,
    HeadNorms,
    LatentKernels,
    LatentQueries,
    Latents,
    Rotation,
    StepBatch,
    Transform,
)
from penstock_server.device.ops import NormVariant, Summand
from penstock_server.device.quantized import QuantFormat, QuantizedMatrix
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton import greedy as triton_greedy
from penstock_server.device.triton.attention import backend
from penstock_server.device.triton.grouped import Gate, GroupedLinear, GroupedQuantized, weighted_sum
from penstock_server.device.triton.invariant import InvariantOps
from penstock_server.device.triton.low_rank import ExpertPairs, LowRankSum
from penstock_server.device.triton.ops import TritonOps
from penstock_server.device.triton.quantized import QuantizedLinear, Segment, can_gate
from penstock_server.device.triton.routing_kernel import route_kernel
from penstock_server.engine import cut
from penstock_server.layers.experts.routing import Router
from penstock_server.layers.experts.spec import CLAMPED_SWIGLU, RoutingSpec
from penstock_server.layers.experts.triton_experts import assign
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LATENT = AttentionShape(16, 1, 576, 576**-0.5, 64, value_dim=512, values_in_keys=True)
CASES: dict[str, tuple[AttentionShape, torch.dtype]] = {
    "64": (AttentionShape(32, 8, 64, 0.125, 64), BF16),
    "128": (AttentionShape(32, 8, 128, 0.088, 64), BF16),
    "normed": (AttentionShape(32, 4, 128, 0.088, 64), BF16),
    "normed-256": (AttentionShape(16, 8, 256, 0.0625, 64), BF16),
    "whole": (AttentionShape(32, 8, 128, 0.088, 64), BF16),
    "whole-40": (AttentionShape(40, 8, 128, 0.088, 64), BF16),  # OLMo 2 32B
    "clipped": (AttentionShape(32, 8, 128, 0.088, 64, alibi=Alibi((0.5,) * 32)), BF16),
    "256": (AttentionShape(16, 8, 256, 0.0625, 64), BF16),
    "latent": (LATENT, BF16),
    "float16": (AttentionShape(32, 8, 128, 0.088, 64), FP16),
    "float32": (AttentionShape(32, 8, 128, 0.088, 64), FP32),
    "float32-256": (AttentionShape(16, 8, 256, 0.0625, 64), FP32),
    "float32-latent": (LATENT, FP32),
    "sinks": (AttentionShape(64, 8, 64, 0.125, 16, mask=AttentionMask(window=128)), BF16),
    "soft-cap": (AttentionShape(16, 8, 256, 0.0625, 16, mask=AttentionMask(window=4096), soft_cap=50.0), BF16),
    "alibi": (AttentionShape(71, 1, 64, 0.125, 64, alibi=Alibi((0.5,) * 71, True, True)), BF16),
    "relative-bias": (
        AttentionShape(8, 8, 64, 1.0, 64, mask=AttentionMask(part="source"), has_relative_bias=True),
        BF16,
    ),
    "chunk": (AttentionShape(40, 8, 80, 0.1, 32, mask=AttentionMask(chunk=8192, part="answer")), BF16),
    "fp8-e4m3fn": (AttentionShape(32, 8, 128, 0.088, 64), BF16),
    "fp8-e5m2": (AttentionShape(32, 8, 128, 0.088, 64), BF16),
    "fp8-64": (AttentionShape(32, 8, 64, 0.125, 64), FP16),
    "fp8-256": (AttentionShape(16, 8, 256, 0.0625, 64), BF16),
    "fp8-latent": (LATENT, BF16),
}

# Formats of quantized layers, each launched with few rows, as splits, and with many.
QUANTIZED = {
    "gptq": QuantFormat(4, 128, offset=8, number="float16"),
    "awq": QuantFormat(4, 128, has_mins=True, number="float16", zeros="uint4"),
    "hqq": QuantFormat(4, 64, has_mins=True, number="bfloat16", zeros="bfloat16"),
    "int4": QuantFormat(4, 32, offset=8, has_mins=True, number="bfloat16"),
    "q2_k": QuantFormat(2, 16, has_mins=True, number="uint4"),
    "q4_k": QuantFormat(4, 32, has_mins=True, number="int8"),
    "q6_k": QuantFormat(6, 16, offset=32, number="int8"),
    "w8": QuantFormat(8, 4096, offset=128),
    "fp8": QuantFormat(8, 128, code="e4m3fn"),
    "nf4": QuantFormat(4, 64, table=tuple(range(-120, 136, 16))),
    "iq4_xs": QuantFormat(4, 32, number="int8", table=tuple(range(-120, 136, 16))),
    "mxfp4": QuantFormat(4, 32, number="e8m0", table=tuple(range(-120, 136, 16))),
    "w8a8": QuantFormat(8, 4096, offset=128, has_narrow_inputs=True),
}

# Computed and new tokens of the sequences of a step: decode rows with splits, without, one alone, and with prompts.
STEPS = [
    [(4999, 1)] * 8,
    [(300, 1), (20, 1), (0, 1)],
    [(16, 1)],
    [(0, 700), (3000, 1), (100, 64)],
    [(0, 7)],
]


def launches(name: str, spans: list[tuple[int, int]]) -> dict[Any, dict[str, Any]]:
    """The arguments of each kernel that a step launches."""
    found: dict[Any, dict[str, Any]] = {}
    triton_device.launch = lambda function, grid, **arguments: found.update({function: arguments})
    if name == "operators":
        launch_operators(sum(new for _, new in spans))
        return found
    if name == "summand":
        launch_summand(sum(new for _, new in spans))
        return found
    if name.startswith("routing"):
        launch_routing(name.removeprefix("routing-"), sum(new for _, new in spans))
        return found
    if name.startswith("experts"):
        _, dtype_name, rows = name.split("-")
        launch_experts(getattr(torch, dtype_name), rows, sum(new for _, new in spans))
        found.pop(route_kernel, None)
        return found
    if name.startswith("adapters"):
        launch_adapters(getattr(torch, name.removeprefix("adapters-")), sum(new for _, new in spans))
        return found
    if name.startswith("deterministic"):
        launch_deterministic(name, sum(new for _, new in spans))
        return found
    if name.startswith("quantized"):
        _, format_name, rows = name.split("-")
        launch_quantized(QUANTIZED[format_name], sum(new for _, new in spans), is_wide=rows == "many")
        return found
    shape, dtype = CASES[name]
    fp8_dtype = torch.float8_e5m2 if name == "fp8-e5m2" else torch.float8_e4m3fn
    kv_dtype = fp8_dtype if name.startswith("fp8") else None
    attention = backend.TritonAttention(shape, torch.device("cpu"), dtype, kv_dtype=kv_dtype)
    lens = [computed + new for computed, new in spans]
    num_tokens = sum(new for _, new in spans)
    starts = torch.tensor([0, *(new for _, new in spans)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    tables = torch.zeros(len(spans), -(-max(lens) // shape.block_tokens), dtype=torch.int32)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    sources = context_lens if shape.mask.part != "context" else None
    max_new = max(new for _, new in spans)
    batch = StepBatch(tokens, tokens, tokens, starts, context_lens, tables, tokens, max_new, max(lens), sources)
    qkv = torch.zeros(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype)
    queries, keys, values = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    cache = attention.allocate(1)
    rope = torch.zeros(9, shape.head_dim // 2)
    clip = norms = None
    if name.startswith("normed"):
        weight = torch.zeros(shape.head_dim, dtype=dtype)
        norms = HeadNorms(weight, None, weight, None, 1e-6, is_layer=False, is_wide=False)
    if name == "clipped":
        clip = 6.0
    if name.startswith("whole"):
        query_weight, key_weight = (torch.zeros(heads.shape[1:]) for heads in (queries, keys))
        norms = HeadNorms(query_weight, None, key_weight, None, 1e-6, is_layer=False, is_wide=True, is_whole=True)
        clip = 8.0
    rotation = None if name == "clipped" else Rotation(rope, rope, tokens, False)
    attention.write_kv(cache, keys, values, tokens, Transform(queries, clip, norms, rotation))
    sinks = torch.zeros(shape.num_heads, dtype=dtype) if name == "sinks" else None
    bias = torch.zeros(shape.num_heads, 257) if shape.has_relative_bias else None
    attention.attend(queries, cache, attention.prepare(batch), sinks, bias)
    if attention.latent is not None:
        launch_latent(attention.latent, cache, attention.prepare(batch), tokens, dtype)
    return found


def launch_latent(latent: LatentKernels, cache: torch.Tensor, metadata: Any, slots: torch.Tensor, dtype: Any) -> None:
    """Launches the kernels of DeepSeek V3, with 16 of its heads; `attend_kernel` as it is launched for them."""
    num_tokens, rope = slots.shape[0], torch.zeros(9, 32)
    x = torch.zeros(num_tokens, 1536 + 512 + 64, dtype=dtype)
    query_weight, weight = torch.zeros(1536, dtype=dtype), torch.zeros(512, dtype=dtype)
    latent.write_latents(cache, Latents(x, query_weight, weight, 1e-6, rope, rope, slots), slots)
    heads = torch.zeros(num_tokens, 16 * 192, dtype=dtype)
    rotary = heads[:, 16 * 128 :].unflatten(-1, (16, 64))
    absorbed = torch.zeros(num_tokens, 16, 512, dtype=dtype)
    latent.attend_latents(LatentQueries(absorbed, rotary, rope, rope), cache, metadata)


def launch_operators(num_tokens: int) -> None:
    """Launches the operators of an 8B Llama and the truncation of its vocabulary."""
    ops = TritonOps(torch.device("cpu"), BF16)
    x, weight = torch.zeros(num_tokens, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    ops.norm(x, weight, None, NormVariant(1e-5), x.clone())
    qkv = torch.zeros(num_tokens, 48, 128, dtype=BF16)
    rope = torch.zeros(9, 64)
    ops.rotate(qkv[:, :32], qkv[:, 32:40], rope, rope, torch.zeros(num_tokens, dtype=torch.int64))
    ops.gated(torch.nn.functional.silu)(torch.zeros(num_tokens, 28672, dtype=BF16))
    ops.elementwise(Xielu(torch.ones(1), torch.ones(1)))(torch.zeros(num_tokens, 21504, dtype=BF16))
    probs, mass = torch.zeros(2, 128256), torch.zeros(2, dtype=torch.int64)
    triton_greedy.choose(torch.zeros(num_tokens, 128256, dtype=BF16), None)
    cut.cut_rows(probs, probs.int(), mass, mass > 0, is_count=False, all_equals=False)


def launch_summand(num_tokens: int) -> None:
    """A norm of Gemma 2, of the sum of the residual and a norm."""
    ops, variant = TritonOps(torch.device("cpu"), BF16), NormVariant(1e-6, is_wide=True)
    x, norm = torch.zeros(num_tokens, 3584, dtype=BF16), ops.pack_norm(torch.zeros(3584), None, variant)
    ops.add(x.clone(), Summand(x, norm, 0.5, x), norm)


ROUTINGS = {
    "deepseek": RoutingSpec(
        *(256, 8, "sigmoid", 1.0, 1e-20, 2.5),
        has_correction=True,
        num_groups=8,
        top_groups=4,
        group_score="best-two",
    ),
    "qwen": RoutingSpec(60, 4),
    "gpt-oss": RoutingSpec(32, 4, "softmax-chosen"),
    "phimoe": RoutingSpec(16, 2, "sparsemixer", jitter=0.01),
}
ROWS_PER_EXPERT = {"few": 4, "some": 16, "more": 32, "many": 65}


def launch_routing(name: str, num_tokens: int) -> None:
    """With a gate of the shared expert where the scoring is softmax."""
    spec = ROUTINGS[name]
    num, x = spec.num_experts, torch.zeros(num_tokens, 2048, dtype=BF16)
    correction = torch.zeros(num) if spec.has_correction else None
    gate = torch.zeros(2048, dtype=BF16) if spec.scoring == "softmax" else None
    logits, counts = torch.zeros(num_tokens, num, dtype=BF16), torch.zeros(num, dtype=torch.int32)
    linear: Any = None
    assignment = assign(logits, Router(linear, correction, spec), range(num), counts, x, gate)
    weighted_sum(torch.zeros(num_tokens * spec.top_k, 2048, dtype=BF16), assignment, x, range(num))


def launch_experts(dtype: torch.dtype, rows: str, num_tokens: int) -> None:
    """Gate and up of experts, dense and quantized, with tiles for this many rows."""
    num, mean = 8, ROWS_PER_EXPERT[rows]
    num_tokens = (mean - 1) * num + num_tokens % num + 1
    spec, counts = RoutingSpec(num, 1), torch.zeros(num, dtype=torch.int32)
    x, linear = torch.zeros(num_tokens, 2048, dtype=dtype), None
    assignment = assign(torch.zeros(num_tokens, num), Router(linear, None, spec), range(num), counts, x, None)  # type: ignore[arg-type]
    bias, output = torch.zeros(num, 1536, dtype=dtype), torch.zeros(num_tokens, 768, dtype=dtype)
    GroupedLinear(torch.zeros(num, 1536, 2048, dtype=dtype), bias, Gate(CLAMPED_SWIGLU, 1.7, 7.0))(
        x, assignment, output
    )
    if dtype == BF16:
        matrix = QuantizedMatrix((num * 1536, 2048), QUANTIZED["gptq"], lambda: iter(()))
        segment = Segment.pack([matrix], 0, None, torch.device("cpu"), gated=False)
        GroupedQuantized(segment, num, None, None, Gate("silu"))(x, assignment, output)


def launch_adapters(dtype: torch.dtype, num_tokens: int) -> None:
    """Queries, keys and values of an 8B Llama, its embedding, and gate and up of experts."""
    columns = [range(4096), range(4096, 5120), range(5120, 6144)]
    low_rank = LowRankSum.of(num_tokens, columns, 64, 8, torch.device("cpu"))
    x, y = torch.zeros(num_tokens, 4096, dtype=dtype), torch.zeros(num_tokens, 6144, dtype=dtype)
    ids, tables = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    low_rank.add(x, y, ids, tables)
    embedding = LowRankSum.of(0, [range(4096)], 64, 8, torch.device("cpu"))
    embedding.add_looked_up(128256, ids, x, ids, tables)
    experts = LowRankSum.of(num_tokens, [range(1536), range(768), range(768, 1536)], 64, 8, torch.device("cpu"), 5)
    pairs = ExpertPairs.of(torch.zeros(num_tokens, 2, dtype=torch.int32), range(8), ids, tables)
    experts.add_of_experts(x, torch.zeros(2 * num_tokens, 1536, dtype=dtype), pairs)


def launch_deterministic(name: str, num_tokens: int) -> None:
    """A projection of an 8B Llama, a router in float32, or the absorbed projection of DeepSeek V2's heads."""
    dtype = FP32 if name.endswith("float32") else BF16
    ops = InvariantOps(torch.device("cpu"), dtype)
    if name.endswith("heads"):
        out = torch.zeros(num_tokens, 16, 576, dtype=dtype)[..., :512]
        ops.pack_heads(torch.zeros(16, 512, 128, dtype=dtype))(torch.zeros(num_tokens, 16, 128, dtype=dtype), out)
        return
    weight = torch.zeros(256, 7168, dtype=dtype) if dtype == FP32 else torch.zeros(4096, 14336, dtype=dtype)
    ops.pack_linear(weight, None)(torch.zeros(num_tokens, weight.shape[1], dtype=dtype))


def launch_quantized(format_: QuantFormat, num_tokens: int, *, is_wide: bool) -> None:
    """A projection of an 8B Llama for few rows, and its table; or gate and up for many rows."""
    device, depth = torch.device("cpu"), 4096
    shape = 28672 if is_wide else 4096, depth
    matrix = QuantizedMatrix(shape, format_, lambda: iter(()))
    gated = is_wide and can_gate([matrix], BF16, device)
    linear = QuantizedLinear.pack([matrix], None, BF16, device, gated=gated)
    linear(torch.zeros(65 + num_tokens if is_wide else 1 + num_tokens % 16, depth, dtype=BF16))
    if not is_wide and not format_.has_narrow_inputs:
        linear.rows(torch.zeros(num_tokens, dtype=torch.int64))


def specialize(function: Any, arguments: dict[str, Any], target: GPUTarget) -> tuple[Any, ...]:
    """What a launch with these arguments compiles: options, signature, constants and attributes."""
    nvidia = make_backend(target)
    binder = create_function_from_signature(function.signature, function.params, nvidia)
    bound, specialization, options = binder(**arguments)
    return function._pack_args(nvidia, arguments, bound, specialization, options)


def check(name: str, capability: int) -> None:
    """Prints the resources of each kernel, and how many compilations of it STEPS need."""
    target = GPUTarget("cuda", capability, 32)
    triton_device.capability = lambda device: divmod(capability, 10)
    compilations: dict[Any, dict[str, tuple[Any, ...]]] = {}
    for spans in STEPS:
        for function, arguments in launches(name, spans).items():
            specialized = specialize(function, arguments, target)
            compilations.setdefault(function, {})[str(specialized)] = specialized
    for function, specialized in compilations.items():
        options, signature, constants, attributes = next(iter(specialized.values()))
        source = ASTSource(function, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=options.__dict__)
        resources = {"shared_bytes": compiled.metadata.shared, **registers(compiled.asm["cubin"])}
        resources["tensor_memory_columns"] = compiled.metadata.tmem_size or 0
        products = re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*", compiled.asm["ptx"])
        resources["products"] = sorted(
            {re.sub(r"n\d+k", "k", name) for name in products}
        )  # whatever the tile's columns
        identity = {"case": name, "kernel": function.__name__, "capability": capability}
        print(json.dumps({**identity, "num_compilations": len(specialized), **resources}))


def registers(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of spilled registers of one thread, as the cubin declares them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


for capability in sys.argv[1].split(","):
    for name in sys.argv[2].split(","):
        check(name, int(capability))
