// The tokens of an answer, coloured by their probability. The pointer or the arrow keys show a token's alternatives.

import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { type Token } from "./conversation.ts";
import { memo } from "./memo.ts";

/** Shades from probable to improbable, as the classes `p0` to `p4`. */
const SHADES = [0.9, 0.6, 0.3, 0.1];
const CARD_WIDTH_PX = 260;

const shade = (logprob: number) => `p${SHADES.filter((limit) => Math.exp(logprob) < limit).length}`;
const percent = (logprob: number) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;
/** White space that can be seen. */
const visible = (text: string) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

export function TokenView({ tokens }: { tokens: Token[] }) {
  const active = useSignal(-1);
  const area = useRef<HTMLDivElement>(null);
  const onPointer = (event: Event) => {
    const index = (event.target as HTMLElement).dataset.index;
    if (index !== undefined) active.value = Number(index);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const next = {
      ArrowRight: active.value + 1, ArrowLeft: active.value - 1, Home: 0, End: tokens.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    active.value = Math.max(0, Math.min(next, tokens.length - 1));
  };
  const token = tokens[active.value];
  return (
    <div class="tokens" ref={area}>
      <div
        class="token-text"
        tabIndex={0}
        role="group"
        aria-label={`${tokens.length} tokens; the arrow keys show each token's alternatives`}
        onPointerOver={onPointer}
        onPointerDown={onPointer}
        onPointerLeave={() => { active.value = -1; }}
        onKeyDown={onKeyDown}
        onBlur={() => { active.value = -1; }}
      >
        <Spans tokens={tokens} active={active.value} />
      </div>
      <div aria-live="polite">{token && <Card token={token} area={area.current} index={active.value} />}</div>
    </div>
  );
}

const Spans = memo(function Spans({ tokens, active }: { tokens: Token[]; active: number }) {
  return <>{tokens.map((token, index) => (
    <span key={index} data-index={index} class={`token ${shade(token.logprob)}${index === active ? " active" : ""}`}>{token.text}</span>
  ))}</>;
});

function Card({ token, area, index }: { token: Token; area: HTMLElement | null; index: number }) {
  const span = area?.querySelector<HTMLElement>(`[data-index="${index}"]`);
  const left = Math.max(0, Math.min(span?.offsetLeft ?? 0, (area?.clientWidth ?? 0) - CARD_WIDTH_PX));
  const top = (span?.offsetTop ?? 0) + (span?.offsetHeight ?? 0) + 4;
  const isListed = token.alternatives.some(({ text }) => text === token.text);
  const rows = isListed ? token.alternatives : [token, ...token.alternatives];
  return (
    <table class="card" style={{ left: `${left}px`, top: `${top}px`, width: `${CARD_WIDTH_PX}px` }}>
      <caption>{`Token ${index + 1}`}</caption>
      <thead><tr><th>Token</th><th>Probability</th><th>Logprob</th></tr></thead>
      <tbody>
        {rows.map(({ text, logprob }, row) => (
          <tr key={row} class={text === token.text ? "taken" : undefined}>
            <td><code>{visible(text)}</code></td><td>{percent(logprob)}</td><td>{logprob.toFixed(3)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
