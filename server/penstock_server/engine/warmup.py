"""The most expensive steps that the limits allow, as plans that the engine runs before the worker is ready.

The block tables of the sequences repeat the same few blocks, so that the longest contexts need no full pool. Time and
temporary memory are those of real steps; the results are meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock_server.protocol.plan import Adapter, Advances, Grammar, NewSequence, Plan, Sampling

_MAX_BLOCKS = 256  # blocks of the temporary cache
_FIRST_SEQUENCES = 16  # rows that the sampler processes at a time on a CPU
_TOP_N = 20  # the most alternatives that OpenAI's API allows
ANY_TEXT = Grammar("regex", "(?s).*")
_EVERYTHING = Sampling(
    grammar=ANY_TEXT,
    do_sample=True,
    temperature=0.7,
    top_k=1 << 62,  # the cut does not lie in the head
    top_p=0.99,
    typical_p=0.99,
    min_p=1e-6,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    watermark=True,
    top_n=_TOP_N,
    model_logprobs=True,
)
# Rows of different kinds make the sampler copy logits. The first sequence has the longest history; it has no grammar,
# because that would have to accept the history.
_FIRST = (replace(_EVERYTHING, grammar=None), Sampling(), Sampling(grammar=ANY_TEXT), Sampling(top_n=_TOP_N))


@dataclass(frozen=True, slots=True)
class WorstStep:
    """The limits of a step."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    max_context_tokens: int  # for all sequences together: what the pool can hold
    block_tokens: int
    max_source_tokens: int = 0  # 0: the model has no encoder
    max_answer_tokens: int | None = None  # the longest continuation of a source; None: no limit of its own
    has_grammars: bool = True
    adapter: Adapter | None = None  # None: sequences cannot have one
    is_pooled: bool = False  # sequences generate nothing, and with source tokens they are all source

    @property
    def is_encoder(self) -> bool:
        """Whether each sequence is computed in one step."""
        return self.is_pooled and self.max_source_tokens > 0

    def num_blocks(self) -> int:
        """Blocks of the temporary cache."""
        return min(_MAX_BLOCKS, -(-self.max_step_tokens // self.block_tokens))


Step = tuple[list[int], list[int]]  # per sequence: the tokens it advances, and its context including them


def worst_steps(limits: WorstStep) -> tuple[tuple[str, Plan], ...]:
    """Plans by name. No step within the limits needs more memory than the largest of them."""
    if limits.is_pooled:
        return ("worst prefill", plan(limits, prefill(limits))), ("most sequences", plan(limits, mixed(limits)))
    steps: tuple[tuple[str, Plan], ...] = (
        ("worst prefill", plan(limits, prefill(limits))),
        ("worst decode", plan(limits, decode(limits))),
        ("worst mixed step", plan(limits, mixed(limits), prompt_logprobs=True)),
    )
    if limits.max_source_tokens:
        steps = (*steps, ("worst sources", plan(limits, sources(limits))))
    if limits.adapter is not None:
        # It has memory of its own, in proportion to tokens and samples (docs/adr/adapters.md).
        steps = (*steps, ("worst step with adapters", plan(limits, mixed(limits), adapter=limits.adapter)))
    return steps


def first(limits: WorstStep) -> Step:
    """A small step that uses every option."""
    num = min(limits.max_step_sequences, limits.max_step_tokens, _FIRST_SEQUENCES)
    return [1] * num, [1] * num


def prefill(limits: WorstStep) -> Step:
    """The most tokens, in as few sequences as can hold them, at the end of the longest contexts."""
    num_tokens: list[int] = []
    contexts: list[int] = []
    left, room = limits.max_step_tokens, limits.max_context_tokens
    while left and len(num_tokens) < limits.max_step_sequences:
        num_tokens.append(min(left, limits.max_sequence_tokens))
        contexts.append(max(num_tokens[-1], min(room, limits.max_sequence_tokens)))
        left -= num_tokens[-1]
        room = max(0, room - contexts[-1])
    return num_tokens, contexts


def sources(limits: WorstStep) -> Step:
    """The most source tokens: whole prompts, each with the one token that starts the decoder."""
    longest = min(limits.max_source_tokens + 1, limits.max_step_tokens, limits.max_sequence_tokens)
    return prefill(replace(limits, max_sequence_tokens=longest))


def decode(limits: WorstStep) -> Step:
    """The most sequences: one at full length, the others sharing the rest of the pool."""
    num = min(limits.max_step_sequences, limits.max_step_tokens)
    longest = min(limits.max_sequence_tokens, limits.max_context_tokens)
    others = min(longest, max(1, (limits.max_context_tokens - longest) // max(1, num - 1)))
    return [1] * num, [longest] + [others] * (num - 1)


def mixed(limits: WorstStep) -> Step:
    """The most sequences and tokens: like `decode`, but the longest sequence is still in its prompt."""
    num_tokens, contexts = decode(limits)
    num_tokens[0] = min(contexts[0], limits.max_step_tokens - len(num_tokens) + 1)
    return num_tokens, contexts


def plan(limits: WorstStep, step: Step, *, prompt_logprobs: bool = False, adapter: Adapter | None = None) -> Plan:
    """The step with every option on: penalties over the longest texts, samples for all sequences, and, if the caller
    asks for them, logprobs of all prompt tokens."""
    sequences = []
    for place, (num_tokens, context) in enumerate(zip(*step, strict=True)):
        num_source = 0
        if limits.is_encoder:
            num_source = context = num_tokens
        elif limits.max_source_tokens:
            # The longest source: of a prompt that starts here, all but one token; otherwise all before this step.
            if limits.max_answer_tokens is not None and num_tokens > limits.max_answer_tokens:
                # More tokens than a continuation can have, so some are source, and the sequence starts here.
                context = num_tokens
            context = max(context, 2)
            num_source = min(limits.max_source_tokens, context - num_tokens or context - 1)
        blocks = [(place + index) % limits.num_blocks() for index in range(-(-context // limits.block_tokens))]
        sampling = _FIRST[place] if place < len(_FIRST) else _EVERYTHING
        grammar = sampling.grammar if limits.has_grammars else None
        sampling = replace(sampling, grammar=grammar, prompt_logprobs=prompt_logprobs)
        if not limits.has_grammars and not limits.is_pooled:
            sampling = replace(sampling, allowed_tokens=b"\x01")  # masks without grammars
        is_generated = num_tokens == 1 and place == 0 and not limits.is_pooled
        prompt = num_source + 1 if is_generated else context
        sequences.append(
            NewSequence(
                place,
                [0] * context,
                prompt,
                context - num_tokens,
                blocks,
                sampling,
                num_source_tokens=num_source,
                adapter=adapter,
            )
        )
    counts, _ = step
    return Plan(1, (), sequences, Advances.of(range(len(counts)), counts, [True] * len(counts)))
