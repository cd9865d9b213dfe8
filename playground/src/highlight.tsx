// The colours of source text: JSON, regular expressions, Lark grammars. Only a scanner: wrong text is coloured as far as
// it goes, and says nothing of what is wrong.

import { type JSX } from "preact";

export type Language = "json" | "regex" | "lark";
type Kind = "key" | "text" | "number" | "word" | "sign" | "comment";

/** Longer text stays plain, so that typing stays fluent. */
const MAX_LENGTH = 20_000;
/** The kinds of a language's parts are the names of the groups. No pattern has nested repetitions. */
const PATTERNS: Record<Language, RegExp> = {
  json: /(?<key>"(?:[^"\\\n]|\\.)*"(?=\s*:))|(?<text>"(?:[^"\\\n]|\\.)*"?)|(?<number>-?\d[\d.eE+-]*)|(?<word>\b(?:true|false|null)\b)|(?<sign>[{}[\],:])/g,
  regex: /(?<word>\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.)|[.^$])|(?<text>\[\^?\]?(?:[^\]\\]|\\.)*\]?)|(?<number>[*+?]\??|\{\d*,?\d*\})|(?<sign>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:?))?|[)|])/g,
  lark: /(?<comment>\/\/.*|#.*)|(?<text>"(?:[^"\\\n]|\\.)*"?i?)|(?<word>\/(?:[^/\\\n]|\\.)+\/[a-z]*|%\w+)|(?<key>^[ \t]*[?!]?\w+(?:\.-?\d+)?(?=[^:\n]*:))|(?<number>[*+?~]|\b\d+\b)|(?<sign>[:|()[\]]|->)/gm,
};

export interface Part {
  text: string;
  /** Undefined: the colour of plain text. */
  kind?: Kind;
}

/** The parts of a text, which together are the text. */
export function partsOf(text: string, language: Language): Part[] {
  if (text.length > MAX_LENGTH) return [{ text }];
  const parts: Part[] = [];
  let end = 0;
  for (const match of text.matchAll(PATTERNS[language])) {
    const kind = Object.entries(match.groups!).find(([, found]) => found !== undefined)![0] as Kind;
    if (match.index > end) parts.push({ text: text.slice(end, match.index) });
    parts.push({ text: match[0], kind });
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push({ text: text.slice(end) });
  return parts;
}

/** The text as coloured spans. */
export function Highlighted({ text, language }: { text: string; language: Language }): JSX.Element {
  const spans = partsOf(text, language).map(({ text: part, kind }, index) =>
    kind ? <span key={index} class={`s-${kind}`}>{part}</span> : part,
  );
  return <>{spans}</>;
}
