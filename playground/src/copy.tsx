// A button that copies a text.

import { useSignal } from "@preact/signals";

const SHOWN_MS = 1500;

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const outcome = useSignal("");
  const click = async () => {
    outcome.value = (await copied(text)) ? "Copied" : "Not allowed";
    setTimeout(() => { outcome.value = ""; }, SHOWN_MS);
  };
  return <button type="button" class="quiet" aria-label={label} onClick={click}>{outcome.value || "Copy"}</button>;
}

async function copied(text: string): Promise<boolean> {
  // Browsers have no clipboard for pages over plain HTTP, except from this machine; there, only the old command works.
  if (!navigator.clipboard) return copiedByCommand(text);
  return navigator.clipboard.writeText(text).then(() => true, () => false);
}

function copiedByCommand(text: string): boolean {
  const fill = (event: ClipboardEvent) => {
    event.clipboardData?.setData("text/plain", text);
    event.preventDefault();
  };
  document.addEventListener("copy", fill);
  const isDone = document.execCommand("copy");
  document.removeEventListener("copy", fill);
  return isDone;
}
