// The whole page: the history, the conversation and the settings side by side; on a narrow screen, one at a time.

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Composer } from "./composer.tsx";
import { HelpDialog, KeyDialog, SnippetDialog } from "./dialog.tsx";
import { History } from "./history.tsx";
import { ServerState } from "./server_state.tsx";
import { SettingsPanel } from "./settings.tsx";
import { type Theme, changeMode, needsKey, newChat, notice, settings, stop, theme } from "./state.ts";
import { Thread } from "./thread.tsx";

const THEMES: Theme[] = ["auto", "light", "dark"];
type Dialog = "" | "help" | "snippet" | "key";
type Drawer = "" | "history" | "settings";

export function Page() {
  const dialog = useSignal<Dialog>("");
  const drawer = useSignal<Drawer>("");
  const toggle = (name: Drawer) => () => { drawer.value = drawer.value === name ? "" : name; };
  const close = () => { dialog.value = ""; needsKey.value = false; };
  const isAsked = dialog.value === "key" || needsKey.value;

  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
        if (drawer.value) drawer.value = "";
        else stop();
      } else if (event.altKey && event.code === "KeyN") {
        event.preventDefault();
        newChat();
        document.getElementById("draft")?.focus();
      } else if (event.altKey && event.code === "KeyC") {
        event.preventDefault();
        dialog.value = "snippet";
      } else if (event.key === "?" && !isTyping(event.target)) {
        dialog.value = "help";
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  return (
    <div class="page" data-drawer={drawer.value}>
      <header class="bar">
        <button type="button" class="narrow" aria-expanded={drawer.value === "history"} onClick={toggle("history")}>History</button>
        <h1>Penstock</h1>
        <div class="modes" role="group" aria-label="Mode">
          {(["chat", "completion"] as const).map((mode) => (
            <button key={mode} type="button" aria-pressed={settings.value.mode === mode} onClick={() => changeMode(mode)}>
              {mode === "chat" ? "Chat" : "Completion"}
            </button>
          ))}
        </div>
        <ServerState />
        <div class="actions">
          <button type="button" onClick={() => { dialog.value = "snippet"; }}>Code</button>
          <button type="button" onClick={() => { dialog.value = "key"; }}>Key</button>
          <label class="theme"><span class="hidden">Theme</span>
            <select value={theme.value} onChange={(event) => { theme.value = event.currentTarget.value as Theme; }}>
              {THEMES.map((name) => <option key={name} value={name}>{`${name} theme`}</option>)}
            </select>
          </label>
          <button type="button" aria-label="Help" onClick={() => { dialog.value = "help"; }}>?</button>
          <button type="button" class="narrow" aria-expanded={drawer.value === "settings"} onClick={toggle("settings")}>Settings</button>
        </div>
      </header>
      <History onOpen={() => { drawer.value = ""; }} />
      <main>
        {notice.value && (
          <p class="notice" role="alert">{notice.value} <button type="button" onClick={() => { notice.value = ""; }}>Close</button></p>
        )}
        <Thread />
        <Composer />
      </main>
      <SettingsPanel />
      {dialog.value === "help" && <HelpDialog onClose={close} />}
      {dialog.value === "snippet" && <SnippetDialog onClose={close} />}
      {isAsked && <KeyDialog wasRefused={needsKey.value} onClose={close} />}
    </div>
  );
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input, textarea, select");
}
