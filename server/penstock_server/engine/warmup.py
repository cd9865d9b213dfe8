"""The worst step that the limits allow, as plans that the engine runs before the worker is ready.

The sequences' block tables point again and again to the same few blocks, so that the longest contexts are attended to
without the pool that they would fill: time and scratch memory are those of the real thing, the numbers are meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock_server.plan import Advances, Grammar, NewSequence, Plan, Sampling

_MAX_BLOCKS = 256  # of the temporary cache
_FIRST_SEQUENCES = 16  # as many rows as the sampler works on at a time on a CPU
_TOP_N = 20  # as many alternatives as OpenAI's interface allows
ANY_TEXT = Grammar("regex", "(?s).*")
_EVERYTHING = Sampling(
    grammar=ANY_TEXT,
    do_sample=True,
    temperature=0.7,
    top_k=1 << 62,  # no head shows where to cut
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
# Rows that differ from the rest make the sampler copy the rest's logits. The first sequence has the longest history,
# which no grammar is to follow.
_FIRST = (replace(_EVERYTHING, grammar=None), Sampling(), Sampling(grammar=ANY_TEXT), Sampling(top_n=_TOP_N))


@dataclass(frozen=True, slots=True)
class WorstStep:
    """The limits of a step, as warm-up runs them."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    max_context_tokens: int  # of all sequences together: what the pool could hold
    block_tokens: int
    max_source_tokens: int = 0  # 0: the model has no encoder
    max_answer_tokens: int | None = None  # the longest that goes on behind a source; None: as long as the sequence
    has_grammars: bool = True

    def num_blocks(self) -> int:
        """Blocks that the temporary cache needs."""
        return min(_MAX_BLOCKS, -(-self.max_step_tokens // self.block_tokens))


Step = tuple[list[int], list[int]]  # of each sequence: tokens that it advances, and its context with them


def worst_steps(limits: WorstStep) -> tuple[tuple[str, Plan], ...]:
    """By name. No step within the limits takes more memory than the largest of these."""
    steps = (
        ("worst prefill", plan(limits, prefill(limits))),
        ("worst decode", plan(limits, decode(limits))),
        ("worst mixed step", plan(limits, mixed(limits), prompt_logprobs=True)),
    )
    return (*steps, ("worst sources", plan(limits, sources(limits)))) if limits.max_source_tokens else steps


def first(limits: WorstStep) -> Step:
    """So small that nobody waits for it, with all that a step can ask for."""
    num = min(limits.max_step_sequences, limits.max_step_tokens, _FIRST_SEQUENCES)
    return [1] * num, [1] * num


def prefill(limits: WorstStep) -> Step:
    """As many tokens as there may be, of as few sequences as can hold them, at the end of the longest contexts."""
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
    """As many tokens of sources as there may be: whole prompts, each with the one token that begins the answer."""
    longest = min(limits.max_source_tokens + 1, limits.max_step_tokens, limits.max_sequence_tokens)
    return prefill(replace(limits, max_sequence_tokens=longest))


def decode(limits: WorstStep) -> Step:
    """As many sequences as there may be: one at full length, the others sharing what is left of the pool."""
    num = min(limits.max_step_sequences, limits.max_step_tokens)
    longest = min(limits.max_sequence_tokens, limits.max_context_tokens)
    others = min(longest, max(1, (limits.max_context_tokens - longest) // max(1, num - 1)))
    return [1] * num, [longest] + [others] * (num - 1)


def mixed(limits: WorstStep) -> Step:
    """As many sequences and as many tokens: the decode whose longest sequence is still at its prompt."""
    num_tokens, contexts = decode(limits)
    num_tokens[0] = min(contexts[0], limits.max_step_tokens - len(num_tokens) + 1)
    return num_tokens, contexts


def plan(limits: WorstStep, step: Step, prompt_logprobs: bool = False) -> Plan:
    """The step with every option on: penalties over the longest texts, all samples, logprobs of every prompt token.

    The last is up to the caller: they need nothing but room, and time.
    """
    sequences = []
    for place, (num_tokens, context) in enumerate(zip(*step, strict=True)):
        num_source = 0
        if limits.max_source_tokens:
            # The longest: of a prompt that begins here all but a token, of one that goes on all before this step.
            if limits.max_answer_tokens is not None and num_tokens > limits.max_answer_tokens:
                # More than an answer has, so some of it is source: it begins here.
                context = num_tokens
            context = max(context, 2)
            num_source = min(limits.max_source_tokens, context - num_tokens or context - 1)
        blocks = [(place + index) % limits.num_blocks() for index in range(-(-context // limits.block_tokens))]
        sampling = _FIRST[place] if place < len(_FIRST) else _EVERYTHING
        grammar = sampling.grammar if limits.has_grammars else None
        sampling = replace(sampling, grammar=grammar, prompt_logprobs=prompt_logprobs)
        is_generated = num_tokens == 1 and place == 0
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
            )
        )
    counts, _ = step
    return Plan(1, (), sequences, Advances.of(range(len(counts)), counts, [True] * len(counts)))
