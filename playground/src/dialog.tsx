// The dialogs: the request as code, the API key, the keys of the keyboard.

import { useSignal } from "@preact/signals";
import { type ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type Conversation, newId, withMessage } from "./conversation.ts";
import { Code } from "./markdown.tsx";
import { apiKey, setApiKey } from "./server.ts";
import { curl, python } from "./snippet.ts";
import { current, draft, path, requestFor } from "./state.ts";

function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} aria-label={title} onClose={onClose}>
      <header><h2>{title}</h2><button type="button" onClick={() => dialog.current?.close()}>Close</button></header>
      {children}
    </dialog>
  );
}

/** The request that gave the last answer; with a draft, the one that sends the draft. */
function shownRequest(conversation: Conversation) {
  const leaf = path.value.at(-1)?.message;
  if (draft.value.trim()) {
    const id = newId();
    return requestFor(withMessage(conversation, { id, role: "user", content: draft.value, parent: leaf?.id ?? null }), id);
  }
  return requestFor(conversation, leaf?.role === "assistant" ? leaf.parent : (leaf?.id ?? null));
}

export function SnippetDialog({ onClose }: { onClose: () => void }) {
  const kind = useSignal<"curl" | "python">("curl");
  const base = new URL("./", location.href).href;
  const text = { curl, python }[kind.value](base, current.value.mode, shownRequest(current.value), apiKey() !== "");
  return (
    <Dialog title="This request as code" onClose={onClose}>
      <div class="modes" role="group" aria-label="Language">
        <button type="button" aria-pressed={kind.value === "curl"} onClick={() => { kind.value = "curl"; }}>curl</button>
        <button type="button" aria-pressed={kind.value === "python"} onClick={() => { kind.value = "python"; }}>Python</button>
      </div>
      <Code text={text} language={kind.value} />
    </Dialog>
  );
}

export function KeyDialog({ wasRefused, onClose }: { wasRefused: boolean; onClose: () => void }) {
  const key = useSignal(apiKey());
  const save = (event: Event) => {
    event.preventDefault();
    setApiKey(key.value.trim());
    onClose();
  };
  return (
    <Dialog title="API key" onClose={onClose}>
      <form onSubmit={save}>
        {wasRefused && <p role="alert">The server requires an API key. Enter one, then send or regenerate.</p>}
        <label>API key
          <input type="password" autocomplete="off" value={key.value} onInput={(event) => { key.value = event.currentTarget.value; }} />
        </label>
        <p class="hint">Kept until this tab is closed.</p>
        <button type="submit" class="primary">Save</button>
      </form>
    </Dialog>
  );
}

const KEYS: [string, string][] = [
  ["Enter", "send the message"],
  ["Shift+Enter", "new line"],
  ["Esc", "stop the answer; close a dialog or an editor"],
  ["Ctrl+Enter", "in an editor: save"],
  ["Alt+N", "new conversation"],
  ["Alt+C", "this request as code"],
  ["← →", "in the token view: previous and next token"],
  ["?", "this help"],
];

export function HelpDialog({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard" onClose={onClose}>
      <dl class="keys">{KEYS.map(([key, meaning]) => <><dt key={key}><kbd>{key}</kbd></dt><dd>{meaning}</dd></>)}</dl>
      <p>
        An edited message and a regenerated answer are new versions beside the old ones: <b>‹ 1 of 2 ›</b> switches between them.
        Conversations stay in this browser. Documentation of the API: <a href="docs/">docs</a>.
      </p>
    </Dialog>
  );
}
