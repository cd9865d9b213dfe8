// One message: its thoughts, text, tool calls and cost, and what can be done with it.

import { useSignal } from "@preact/signals";
import { type Cost, type Message, type Mode, type ToolCall } from "./conversation.ts";
import { CopyButton } from "./copy.tsx";
import { tokensPerSecond } from "./delta.ts";
import { Code, Markdown } from "./markdown.tsx";
import { memo } from "./memo.ts";
import { jsonOf } from "./parameter.ts";
import { choose, edit, giveResults, regenerate, removeMessage } from "./state.ts";
import { TokenView } from "./token.tsx";

interface Properties {
  message: Message;
  mode: Mode;
  /** The versions of this message, if there are several. */
  siblings: Message[];
  isLast: boolean;
  /** The model is writing it. */
  isRunning: boolean;
}

const NAMES = { user: "You", tool: "Tool" };

export const MessageView = memo(function MessageView({ message, mode, siblings, isLast, isRunning }: Properties) {
  const isEdited = useSignal(false);
  const showsTokens = useSignal(false);
  const { role, content, reasoning, calls, tokens, drafts, cost, finish, error } = message;
  const isAnswer = role === "assistant";
  const name = isAnswer ? (message.model ?? "Model") : NAMES[role];
  return (
    <article class={`message ${role}`} aria-label={isAnswer ? "Answer" : name} aria-busy={isRunning}>
      <header>
        <h2>{name}</h2>
        {siblings.length > 1 && <Versions message={message} siblings={siblings} />}
      </header>
      {reasoning && (
        <details class="thoughts">
          <summary>{isRunning && !content ? "Thinking…" : "Thoughts"}</summary>
          <Markdown text={reasoning} />
        </details>
      )}
      {isEdited.value
        ? <Editor message={message} onClose={() => { isEdited.value = false; }} />
        : showsTokens.value && tokens
          ? <TokenView tokens={tokens} drafts={drafts ?? []} />
          : mode === "completion" || role === "tool" ? content && <pre class="plain">{content}</pre> : content && <Markdown text={content} />}
      {calls?.map((call) => <Call key={call.id} call={call} />)}
      {isRunning && <span class="cursor" role="status" aria-label="The answer is being written" />}
      {error && <p class="error" role="alert">{error}</p>}
      {isLast && calls && calls.length > 0 && !isRunning && <Results message={message} calls={calls} />}
      {!isEdited.value && !isRunning && (
        <footer>
          <CopyButton text={content} label="Copy message" />
          <button type="button" class="quiet" onClick={() => { isEdited.value = true; }}>Edit</button>
          {isAnswer && <button type="button" class="quiet" onClick={() => void regenerate(message)}>Regenerate</button>}
          {tokens && (
            <button type="button" class="quiet" aria-pressed={showsTokens.value} onClick={() => { showsTokens.value = !showsTokens.value; }}>
              Tokens
            </button>
          )}
          <button type="button" class="quiet" onClick={() => void removeMessage(message)}>Delete</button>
          {isAnswer && <Figures cost={cost} finish={finish ?? (error ? "failed" : "incomplete")} />}
        </footer>
      )}
      {isRunning && cost && <footer><Figures cost={cost} /></footer>}
    </article>
  );
});

function Versions({ message, siblings }: { message: Message; siblings: Message[] }) {
  const index = siblings.indexOf(message);
  const step = (label: string, by: number, sign: string) => (
    <button
      type="button"
      class="quiet"
      aria-label={label}
      disabled={!siblings[index + by]}
      onClick={() => void choose(siblings[index + by]!)}
    >
      {sign}
    </button>
  );
  return (
    <span class="versions" role="group" aria-label="Versions">
      {step("Previous version", -1, "‹")}
      <span>{`${index + 1} of ${siblings.length}`}</span>
      {step("Next version", 1, "›")}
    </span>
  );
}

function Editor({ message, onClose }: { message: Message; onClose: () => void }) {
  const text = useSignal(message.content);
  const save = () => {
    onClose();
    void edit(message, text.value);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape") onClose();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    event.stopPropagation();
  };
  return (
    <div class="editor">
      <textarea
        ref={(element) => element?.focus()}
        aria-label="Edit message"
        rows={Math.min(20, text.value.split("\n").length + 1)}
        value={text.value}
        onInput={(event) => { text.value = event.currentTarget.value; }}
        onKeyDown={onKeyDown}
      />
      <button type="button" class="primary" onClick={save}>{message.role === "assistant" ? "Save" : "Send"}</button>
      <button type="button" onClick={onClose}>Cancel</button>
    </div>
  );
}

function Call({ call }: { call: ToolCall }) {
  const parsed = jsonOf(call.arguments);
  const text = "problem" in parsed ? call.arguments : JSON.stringify(parsed.value, null, 2);
  return (
    <details class="call" open>
      <summary>Call of <code>{call.name}</code></summary>
      <Code text={text} language="json" />
    </details>
  );
}

function Results({ message, calls }: { message: Message; calls: ToolCall[] }) {
  const results = useSignal<string[]>(calls.map(() => ""));
  const change = (index: number, text: string) => { results.value = results.value.with(index, text); };
  return (
    <form class="results" onSubmit={(event) => { event.preventDefault(); void giveResults(message, results.value); }}>
      {calls.map((call, index) => (
        <label key={call.id}>
          {`Result of ${call.name}`}
          <textarea rows={2} value={results.value[index]} onInput={(event) => change(index, event.currentTarget.value)} />
        </label>
      ))}
      <button type="submit" class="primary">Send results</button>
    </form>
  );
}

/** Why an answer ended, where the reason needs other words or none. */
const ENDINGS: Record<string, string> = { stop: "", tool_calls: "", length: "length limit" };

function Figures({ cost, finish }: { cost?: Cost; finish?: string }) {
  const speed = cost && tokensPerSecond(cost);
  const figures = [
    cost?.firstTextAt !== undefined && `first token ${(cost.firstTextAt / 1000).toFixed(2)} s`,
    speed !== undefined && `${speed.toFixed(1)} tokens/s`,
    cost?.numTokens !== undefined && `${cost.numTokens} tokens${cost.numChoices > 1 ? ` in ${cost.numChoices} answers` : ""}`,
    cost?.numPromptTokens !== undefined && `prompt ${cost.numPromptTokens}${cost.numCachedTokens ? ` (${cost.numCachedTokens} cached)` : ""}`,
    finish && (ENDINGS[finish] ?? finish),
  ];
  return <span class="figures">{figures.filter(Boolean).join(" · ")}</span>;
}
