"""Trains Medusa heads for the embedded model on its own answers: a chain, or TGI's second layout (`--layout tgi`).

The model answers questions about pairs of words and about sentences of Python's documentation. Heads are residual
blocks in front of the model's own output matrix, which stays as it is; those of a chain also read the matrix's row of
the last token. They choose among the tokens that the answers have most often, because a product with the whole matrix
would cost a fifth of a step. One question in ten is held out, and the accuracy of each head is that on their answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import peers
import torch
from load import prompt_of
from penstock import LLM, SamplingParams
from penstock_server.device.attention import preferred_block_tokens
from penstock_server.device.attention.interface import StepBatch
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.folder import gguf_folder
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

FOLDER = peers.PEERS / "medusa"
# None of them is in a benchmark, which asks: Tell me about …
QUESTIONS = (
    "What is{}?",
    "Explain{} to a child.",
    "Write a short story about{}.",
    "How are{} related?",
    "Give three facts about{}.",
    "Why does{} matter?",
    "Describe{} in a few sentences.",
    "Tell me a bit more on{}, please.",
    "Write an email about{}.",
    "List the steps to make{}.",
)
# More tokens would not be right more often (docs/adr/drafting.md), and the product with their rows takes longer.
NUM_HEADS, NUM_TOKENS = 4, 2048
ANSWER_TOKENS, CHAT_TOKENS = 120, 512
CHATS_PER_STEP = 16
BATCH_ROWS = 512
LEARNING_RATE = 2e-3
Chat = tuple[list[int], int]  # token ids, and the number of those that the question has


def questions(count: int) -> Iterator[str]:
    """Chats with one question each, in random order."""
    draw, words = random.Random("medusa"), peers.prompt_words()
    entries = [" ".join(text.split()) for text in topics.values()]
    for index in range(count):
        if index % 8 == 7:
            entry = draw.choice(entries)
            sentence = draw.choice(re.split(r"(?<=[.:]) ", entry))[:300]
            question = f"Summarize this: {sentence}"
        else:
            question = draw.choice(QUESTIONS).format(prompt_of(words, draw.choice((1, 2, 2)), draw))
        yield f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def answers(count: int) -> list[Chat]:
    """One answer to each question. Half of them are greedy."""
    params = [SamplingParams(max_tokens=ANSWER_TOKENS, temperature=index % 2 / 2, seed=1) for index in range(count)]
    with LLM(dequantize=True, standby="off", max_batch_total_tokens=40_000) as model:
        found = model.generate(list(questions(count)), params)
    return [(one.prompt_token_ids + one.token_ids, len(one.prompt_token_ids)) for one in found]


def base_model() -> CausalModel:
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    block_tokens = preferred_block_tokens(cpu, dtype)
    model = load_model(LoadOptions(gguf_folder(peers.bf16_gguf()), dtype, cpu, block_tokens), RankGroup())
    model.allocate_cache(CHATS_PER_STEP * -(-CHAT_TOKENS // block_tokens))
    return model


@torch.inference_mode()
def outputs_of(model: CausalModel, chats: Sequence[Chat]) -> Iterator[Tensor]:
    """Outputs [answer tokens, hidden] for each chat, from which the tokens of its answer were sampled."""
    cpu = torch.device("cpu")
    block_tokens = preferred_block_tokens(cpu, torch.bfloat16)
    blocks = torch.arange(CHATS_PER_STEP * -(-CHAT_TOKENS // block_tokens), dtype=torch.int32).view(CHATS_PER_STEP, -1)
    capacity = blocks.shape[1] * block_tokens
    for part in (chats[first : first + CHATS_PER_STEP] for first in range(0, len(chats), CHATS_PER_STEP)):
        lengths = [len(ids) for ids, _ in part]
        assert max(lengths) <= capacity, "questions are shorter than CHAT_TOKENS without an answer"
        positions = [torch.arange(length) for length in lengths]
        starts = list(itertools.accumulate(lengths, initial=0))
        answers = [(start + asked - 1, start + len(ids) - 1) for start, (ids, asked) in zip(starts, part, strict=False)]
        batch = StepBatch(
            token_ids=torch.tensor([token for ids, _ in part for token in ids]),
            positions=torch.cat(positions),
            slots=torch.cat([chat * capacity + found for chat, found in enumerate(positions)]),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=blocks[: len(part)],
            sample_rows=torch.cat([torch.arange(*answer) for answer in answers]),
            max_query_tokens=max(lengths),
            max_context_tokens=max(lengths),
        )
        yield from model.forward(batch).clone().split([end - start for start, end in answers])


@dataclass(frozen=True)
class Rows:
    """outputs [rows, hidden]: the model sampled a token from each; tokens [rows, 1 + heads]: places in `token_ids` of
    that token and the tokens after it, -100 after the end of an answer and for other tokens."""

    outputs: Tensor
    tokens: Tensor


def rows_of(outputs: Iterable[Tensor], chats: Sequence[Chat], token_ids: Tensor) -> Rows:
    """outputs: of each chat, as of `outputs_of`."""
    place_of = torch.full((int(max(token_ids.max(), *(max(ids) for ids, _ in chats))) + 1,), -100)
    place_of[token_ids] = torch.arange(len(token_ids))
    tokens = []
    for ids, num_asked in chats:
        padded = functional.pad(place_of[ids[num_asked:]], (0, NUM_HEADS), value=-100)
        tokens.append(padded.unfold(0, NUM_HEADS + 1, 1))
    return Rows(torch.cat(list(outputs)), torch.cat(tokens))


class Heads(nn.Module):
    """Start as the identity: the prediction of the token before."""

    def __init__(self, matrix: Tensor, is_chain: bool) -> None:
        """matrix: [tokens, hidden]"""
        super().__init__()
        # PERF: AMX multiplies bf16 several times as fast as float32, other CPUs a fraction as fast.
        dtype = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32
        self.matrix, self.is_chain = matrix.to(dtype), is_chain
        self.token_rows = functional.pad(matrix.float(), (0, 0, 0, 1))
        hidden_size = matrix.shape[1]
        self.layers = nn.ModuleList(nn.Linear((1 + is_chain) * hidden_size, hidden_size) for _ in range(NUM_HEADS))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, outputs: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """The logits [rows, tokens] of each head. tokens [rows, heads or more]: of a row, in front of the predicted one
        of each head."""
        x = outputs
        for index, layer in enumerate(self.layers):
            if self.is_chain:
                # -100 is no token: the last row, of zeros.
                known = self.token_rows[tokens[:, index].clamp(min=-1)]
                x = x + functional.silu(layer(torch.cat((x, known), 1)))
            else:
                x = outputs + functional.silu(layer(outputs))
            yield functional.linear(x.to(self.matrix.dtype), self.matrix).float()


def train(heads: Heads, rows: Rows, num_epochs: int) -> None:
    """Adam, with a learning rate that falls to 0 like a cosine."""
    optimizer = torch.optim.Adam(heads.parameters(), LEARNING_RATE)
    num_steps = num_epochs * len(rows.outputs) // BATCH_ROWS
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    batches = (part for _ in range(num_epochs) for part in torch.randperm(len(rows.outputs)).split(BATCH_ROWS))
    for step, batch in zip(range(num_steps), batches, strict=False):
        tokens = rows.tokens[batch]
        losses = [
            functional.cross_entropy(logits, tokens[:, 1 + index])
            for index, logits in enumerate(heads(rows.outputs[batch].float(), tokens))
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step} of {num_steps}: loss {[round(loss.item(), 2) for loss in losses]}", flush=True)


@torch.inference_mode()
def accuracies(heads: Heads, rows: Rows) -> list[float]:
    """Each head's share of right first choices after right choices of the heads before it, over all answer tokens."""
    num_right, num_rows = [0] * NUM_HEADS, 0
    for outputs, tokens in zip(rows.outputs.split(BATCH_ROWS), rows.tokens.split(BATCH_ROWS), strict=True):
        is_right = torch.ones(len(tokens), dtype=torch.bool)
        for index, logits in enumerate(heads(outputs.float(), tokens)):
            is_right &= logits.argmax(-1) == tokens[:, 1 + index]
            num_right[index] += int(is_right.sum())
        num_rows += len(tokens)
    return [right / max(1, before) for before, right in itertools.pairwise([num_rows, *num_right])]


def save(folder: Path, heads: Heads, token_ids: Tensor) -> None:
    tensors = {
        f"{index}.0.linear.{name}": value.detach().bfloat16().contiguous()
        for index, layer in enumerate(heads.layers)
        for name, value in layer.named_parameters()
    }
    save_file({**tensors, "token_ids": token_ids}, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def make_heads(folder: Path = FOLDER, num_questions: int = 1600, num_epochs: int = 6, *, is_chain: bool = True) -> Path:
    """The folder of heads, which are trained if they are missing."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    started, kept = time.perf_counter(), folder / "answers.json"
    if not kept.exists():
        kept.write_text(json.dumps(answers(num_questions)), encoding="utf-8")
    chats = [chat for chat in json.loads(kept.read_text(encoding="utf-8")) if len(chat[0]) > chat[1]]
    print(f"{sum(len(ids) - asked for ids, asked in chats)} tokens of {len(chats)} answers", flush=True)
    torch.manual_seed(0)
    frequencies = Counter(token for ids, num_asked in chats for token in ids[num_asked:])
    token_ids = torch.tensor(sorted(token for token, _ in frequencies.most_common(NUM_TOKENS)))
    model = base_model()
    num_held_out = len(chats) // 10
    parts = chats[:num_held_out], chats[num_held_out:]
    held_out, rows = (rows_of(outputs_of(model, part), part, token_ids) for part in parts)
    heads = Heads(model.head_rows(token_ids), is_chain)
    train(heads, rows, num_epochs)
    shares = ", ".join(f"{100 * share:.0f} %" for share in accuracies(heads, held_out))
    print(f"accuracy on held-out answers by head: {shares}; {time.perf_counter() - started:.0f} s", flush=True)
    save(folder, heads, token_ids)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--questions", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--layout", choices=("chain", "tgi"), default="chain")
    options = parser.parse_args()
    make_heads(options.out, options.questions, options.epochs, is_chain=options.layout == "chain")


if __name__ == "__main__":
    main()
