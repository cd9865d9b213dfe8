// The conversations that this browser keeps.

import { current, heads, newChat, openConversation, removeConversation, removeHistory } from "./state.ts";

export function History({ onOpen }: { onOpen: () => void }) {
  const confirmed = () => confirm("Delete all conversations of this browser?") && removeHistory();
  return (
    <nav class="history" aria-label="History">
      <button type="button" class="primary" onClick={() => { newChat(); onOpen(); }}>New conversation</button>
      <ul>
        {heads.value.map(({ id, title, mode }) => (
          <li key={id} class={id === current.value.id ? "current" : undefined}>
            <button
              type="button"
              class="open"
              aria-current={id === current.value.id ? "page" : undefined}
              onClick={() => { void openConversation(id); onOpen(); }}
            >
              {title || "Untitled"}{mode === "completion" && <small> completion</small>}
            </button>
            <button type="button" class="quiet" aria-label={`Delete ${title}`} onClick={() => void removeConversation(id)}>×</button>
          </li>
        ))}
      </ul>
      {heads.value.length > 0 && <button type="button" class="quiet" onClick={confirmed}>Delete all</button>}
      <p class="hint">Kept in this browser only.</p>
    </nav>
  );
}
