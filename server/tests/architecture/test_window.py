"""If every layer has a sliding window, blocks before it can be reused without effect on the sequence."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_run import BLOCK_TOKENS, EngineRun, Running
from tiny_models import make_model, prompts

WINDOW = 10
NUM_TOKENS = 30
CHUNK = 8
SHARED_TOKENS = 24


def held(sequence: Running) -> list[int]:
    """The blocks in the window of its next token."""
    return sequence.blocks[max(0, sequence.num_computed + 1 - WINDOW) // BLOCK_TOKENS :]


class WindowedRun(EngineRun):
    """Releases blocks before a sequence's window, so that other sequences overwrite them."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        super().__init__(folder)
        self.free_blocks = self.free_blocks[:num_blocks]
        self.sequences: list[Running] = []

    def advance(self, new: list[Running]) -> bool:
        self.sequences += new
        is_going_on = self._step(self.sequences, NUM_TOKENS, CHUNK, new=new)
        seen = {block for sequence in self.sequences for block in held(sequence)}
        placed = {block for sequence in self.sequences for block in sequence.blocks}
        self.free_blocks += sorted(placed - seen - set(self.free_blocks))
        return is_going_on

    def start(self, prompt: list[int]) -> Running:
        return self._sequence(prompt)


@torch.inference_mode()
def test_blocks_before_the_window_may_be_overwritten(tmp_path: Path) -> None:
    reference = make_model("mistral", sliding_window=WINDOW)
    reference.save_pretrained(tmp_path)
    texts = prompts(3, [45, 31, 44], 131)
    texts[1][:SHARED_TOKENS] = texts[0][:SHARED_TOKENS]
    run = WindowedRun(tmp_path, num_blocks=18)  # 53 would be needed without windows
    assert run.engine.model.traits.window_tokens == WINDOW

    first = run.start(texts[0])
    run.advance([first])
    while first.num_computed < SHARED_TOKENS:
        run.advance([])
    second = run.start(texts[1])
    second.num_computed = SHARED_TOKENS
    num_lost = len(first.blocks) - len(held(first))
    second.blocks = [0] * num_lost + held(first)
    assert num_lost == 3
    run.advance([second])
    run.advance([run.start(texts[2])])
    while run.advance([]):
        pass

    assert sum(len(sequence.blocks) for sequence in run.sequences) > 2 * 18
    for sequence, text in zip(run.sequences, texts, strict=True):
        token_ids = list(text)
        while len(token_ids) < len(text) + NUM_TOKENS:
            token_ids.append(int(reference(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
        assert sequence.token_ids == token_ids
