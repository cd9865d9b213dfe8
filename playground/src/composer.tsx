// Where the user writes. Enter sends, Shift+Enter begins a new line.

import { useEffect, useRef } from "preact/hooks";
import { type Message } from "./conversation.ts";
import { canSend, current, draft, isRunning, path, problems, send, stop } from "./state.ts";

export function Composer() {
  const field = useRef<HTMLTextAreaElement>(null);
  const isCompletion = current.value.mode === "completion";
  const leaf: Message | undefined = path.value.at(-1)?.message;
  const wrong = problems.value;
  useEffect(() => { field.current?.focus(); }, [current.value.id]);

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void send();
  };
  const name = isCompletion ? (leaf ? "Further text" : "Text to continue") : "Message";
  return (
    <form class="composer" onSubmit={(event) => { event.preventDefault(); void send(); }}>
      {wrong.length > 0 && (
        <p class="error" role="status">{wrong.map(({ setting, problem }) => `${setting} ${problem}`).join("; ")}</p>
      )}
      <div class="row">
        <textarea
          id="draft"
          ref={field}
          rows={isCompletion ? 5 : 2}
          aria-label={name}
          placeholder={`${name} (Enter sends, Shift+Enter for a new line)`}
          value={draft.value}
          onInput={(event) => { draft.value = event.currentTarget.value; }}
          onKeyDown={onKeyDown}
        />
        {isRunning.value
          ? <button type="button" class="primary" onClick={stop}>Stop</button>
          : <button type="submit" class="primary" disabled={!canSend.value}>{isCompletion && leaf && !draft.value ? "Continue" : "Send"}</button>}
      </div>
    </form>
  );
}
