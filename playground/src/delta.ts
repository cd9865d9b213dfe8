// The chunks of a streamed answer → the messages that they are part of.

import { type Alternative, type Cost, type Draft, type Message, type Mode, type Token } from "./conversation.ts";

interface ChatLogprob {
  token: string;
  logprob: number;
  top_logprobs?: { token: string; logprob: number }[];
}

interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

interface Choice {
  index: number;
  finish_reason?: string | null;
  /** Of completions. */
  text?: string;
  delta?: { content?: string | null; reasoning_content?: string | null; tool_calls?: CallDelta[] };
  logprobs?: {
    content?: ChatLogprob[] | null;
    tokens?: string[];
    token_logprobs?: number[];
    top_logprobs?: (Record<string, number> | null)[] | null;
  } | null;
  drafts?: { verified: number; accepted: number }[];
}

export interface Chunk {
  model?: string;
  choices?: Choice[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number } | null;
  } | null;
  error?: { message?: string };
}

/** Adds a chunk to the answers, of which there is one for each choice. `at` is in milliseconds since the request was sent. */
export function added(answers: Message[], chunk: Chunk, mode: Mode, at: number): Message[] {
  const hasText = (chunk.choices ?? []).some((choice) => numCharacters(choice) > 0);
  return answers.map((answer, index) => {
    const cost = costWith(answer.cost ?? { numChoices: answers.length }, chunk, hasText ? at : undefined);
    const choices = (chunk.choices ?? []).filter((choice) => choice.index === index);
    const begun: Message = { ...answer, cost, model: chunk.model ?? answer.model };
    return choices.reduce((sum, choice) => withChoice(sum, choice, mode), begun);
  });
}

function numCharacters({ text, delta }: Choice): number {
  const calls = delta?.tool_calls?.length ?? 0;
  return (text ?? "").length + (delta?.content ?? "").length + (delta?.reasoning_content ?? "").length + calls;
}

function costWith(cost: Cost, { usage }: Chunk, textAt: number | undefined): Cost {
  return {
    ...cost,
    firstTextAt: cost.firstTextAt ?? textAt,
    lastTextAt: textAt ?? cost.lastTextAt,
    numPromptTokens: usage?.prompt_tokens ?? cost.numPromptTokens,
    numCachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? cost.numCachedTokens,
    numTokens: usage?.completion_tokens ?? cost.numTokens,
  };
}

function withChoice(answer: Message, choice: Choice, mode: Mode): Message {
  const { delta, logprobs } = choice;
  const reasoning = (answer.reasoning ?? "") + (delta?.reasoning_content ?? "");
  const calls = delta?.tool_calls?.reduce(withCall, answer.calls ?? []) ?? answer.calls;
  const newTokens = logprobs ? (mode === "chat" ? chatTokens(logprobs) : completionTokens(logprobs)) : [];
  const tokens = newTokens.length > 0 ? [...(answer.tokens ?? []), ...newTokens] : answer.tokens;
  // A chunk has one generated token, behind those of an echoed prompt; its drafts begin there.
  const drafts = choice.drafts?.map(({ verified, accepted }): Draft => ({ first: (tokens?.length ?? 0) - 1, verified, accepted }));
  return {
    ...answer,
    content: answer.content + (choice.text ?? delta?.content ?? ""),
    reasoning: reasoning || undefined,
    calls,
    tokens,
    drafts: drafts ? [...(answer.drafts ?? []), ...drafts] : answer.drafts,
    finish: choice.finish_reason ?? answer.finish,
  };
}

function withCall(calls: NonNullable<Message["calls"]>, delta: CallDelta): NonNullable<Message["calls"]> {
  const call = calls[delta.index] ?? { id: "", name: "", arguments: "" };
  const { name = "", arguments: text = "" } = delta.function ?? {};
  const changed = { id: delta.id ?? call.id, name: call.name + name, arguments: call.arguments + text };
  return [...calls.slice(0, delta.index), changed, ...calls.slice(delta.index + 1)];
}

function chatTokens({ content }: NonNullable<Choice["logprobs"]>): Token[] {
  const alternative = ({ token, logprob }: { token: string; logprob: number }) => ({ text: token, logprob });
  return (content ?? []).map((token) => ({
    ...alternative(token),
    alternatives: (token.top_logprobs ?? []).map(alternative),
  }));
}

function completionTokens({ tokens, token_logprobs, top_logprobs }: NonNullable<Choice["logprobs"]>): Token[] {
  return (tokens ?? []).map((text, index) => ({
    text,
    logprob: token_logprobs?.[index] ?? 0,
    alternatives: byLogprob(Object.entries(top_logprobs?.[index] ?? {}).map(([text, logprob]) => ({ text, logprob }))),
  }));
}

function byLogprob(alternatives: Alternative[]): Alternative[] {
  return alternatives.sort((one, other) => other.logprob - one.logprob);
}

/** Tokens per second between the first text and the last, of all choices together; undefined until it can be told. */
export function tokensPerSecond({ firstTextAt, lastTextAt, numTokens, numChoices }: Cost): number | undefined {
  if (firstTextAt === undefined || lastTextAt === undefined || numTokens === undefined) return undefined;
  const seconds = (lastTextAt - firstTextAt) / 1000;
  return seconds > 0 && numTokens > numChoices ? (numTokens - numChoices) / seconds : undefined;
}
