// What the server is doing now: one line, and the rest on demand.

import { useEffect, useRef } from "preact/hooks";
import { info, load, modelNames, notReady } from "./state.ts";

const percent = (share: number) => `${Math.round(share * 100)} %`;

export function ServerState() {
  const now = load.value;
  const about = info.value;
  const details = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const close = (event: Event) => {
      const isOutside = !details.current!.contains(event.target as Node);
      if (isOutside || (event as KeyboardEvent).key === "Escape") details.current!.open = false;
    };
    const kinds = ["pointerdown", "keydown"];
    kinds.forEach((kind) => addEventListener(kind, close));
    return () => kinds.forEach((kind) => removeEventListener(kind, close));
  }, []);
  return (
    <details class="server" ref={details}>
      <summary>
        <span class={notReady.value ? "dot bad" : "dot"} aria-hidden="true" />
        <span>{notReady.value || (now ? "Ready" : "Connecting")}</span>
        {now && <span class="numbers">{`${now.numRunning} running · ${now.numQueued} queued · KV ${percent(now.kvUsed)}`}</span>}
      </summary>
      <dl>
        <dt>Models</dt><dd>{modelNames.value.join(", ") || "–"}</dd>
        {now && <>
          <dt>Running</dt><dd>{`${now.numRunning} of ${about?.max_concurrent_requests ?? "–"}`}</dd>
          <dt>Queued</dt><dd>{`${now.numQueued} (${now.queuedTokens} tokens)`}</dd>
          <dt>KV cache in use</dt>
          <dd><meter min={0} max={1} value={now.kvUsed} aria-label="KV cache in use" /> {`${percent(now.kvUsed)} of ${now.kvTokens} tokens`}</dd>
          <dt>Prefix cache</dt>
          <dd>{`${percent(now.kvCached)} of the KV cache${now.prefixHits === undefined ? "" : `, ${percent(now.prefixHits)} of tokens found`}`}</dd>
          <dt>Worker restarts</dt><dd>{now.workerRestarts}</dd>
        </>}
        {about && <>
          <dt>Context</dt><dd>{`${about.max_total_tokens} tokens, prompts up to ${about.max_input_tokens}`}</dd>
          <dt>Version</dt><dd>{about.version}</dd>
        </>}
      </dl>
    </details>
  );
}
