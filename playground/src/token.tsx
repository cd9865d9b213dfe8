// The tokens of an answer, coloured by their probability, those that were drafted underlined. The pointer or the arrow keys
// show a token's alternatives.

import { useSignal } from "@preact/signals";
import { useMemo, useRef } from "preact/hooks";
import { type Draft, type Token } from "./conversation.ts";
import { acceptance, placesInDrafts } from "./draft.ts";
import { memo } from "./memo.ts";

/** Shades from probable to improbable, as the classes `p0` to `p4`. */
const SHADES = [0.9, 0.6, 0.3, 0.1];
const CARD_WIDTH_PX = 260;

const shade = (logprob: number) => `p${SHADES.filter((limit) => Math.exp(logprob) < limit).length}`;
const percent = (logprob: number) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;
/** White space that can be seen. */
const visible = (text: string) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

export function TokenView({ tokens, drafts }: { tokens: Token[]; drafts: Draft[] }) {
  const active = useSignal(-1);
  const places = useMemo(() => placesInDrafts(drafts), [drafts]);
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
        <Spans tokens={tokens} places={places} active={active.value} />
      </div>
      <div aria-live="polite">{token && <Card token={token} place={places.get(active.value)} area={area.current} index={active.value} />}</div>
      {drafts.length > 0 && <Acceptance drafts={drafts} />}
    </div>
  );
}

const Spans = memo(function Spans({ tokens, places, active }: { tokens: Token[]; places: Map<number, number>; active: number }) {
  const classes = (token: Token, index: number) =>
    `token ${shade(token.logprob)}${places.has(index) ? " drafted" : ""}${index === active ? " active" : ""}`;
  return <>{tokens.map((token, index) => (
    <span key={index} data-index={index} class={classes(token, index)}>{token.text}</span>
  ))}</>;
});

function Acceptance({ drafts }: { drafts: Draft[] }) {
  return (
    <table class="acceptance">
      <caption>Draft tokens by their place in the draft; accepted ones are underlined</caption>
      <thead><tr><th scope="col">Place</th><th scope="col">Verified</th><th scope="col">Accepted</th></tr></thead>
      <tbody>
        {acceptance(drafts).map(({ verified, accepted }, index) => (
          <tr key={index}><td>{index + 1}</td><td>{verified}</td><td>{`${accepted} (${((100 * accepted) / verified).toFixed(0)} %)`}</td></tr>
        ))}
      </tbody>
    </table>
  );
}

interface CardProperties {
  token: Token;
  /** In its draft; undefined: it was no draft token. */
  place?: number;
  area: HTMLElement | null;
  index: number;
}

function Card({ token, place, area, index }: CardProperties) {
  const span = area?.querySelector<HTMLElement>(`[data-index="${index}"]`);
  const left = Math.max(0, Math.min(span?.offsetLeft ?? 0, (area?.clientWidth ?? 0) - CARD_WIDTH_PX));
  const top = (span?.offsetTop ?? 0) + (span?.offsetHeight ?? 0) + 4;
  const isListed = token.alternatives.some(({ text }) => text === token.text);
  const rows = isListed ? token.alternatives : [token, ...token.alternatives];
  return (
    <table class="card" style={{ left: `${left}px`, top: `${top}px`, width: `${CARD_WIDTH_PX}px` }}>
      <caption>{`Token ${index + 1}${place === undefined ? "" : `, drafted at place ${place}`}`}</caption>
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
