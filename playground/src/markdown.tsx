// Markdown → Preact nodes. `marked` only splits the text into tokens: no HTML is made, and HTML in the text is shown as text.

import { type Token, type Tokens, lexer } from "marked";
import { Fragment, type ComponentChildren, type JSX } from "preact";
import { Highlighted } from "./highlight.tsx";
import { memo } from "./memo.ts";
import { CopyButton } from "./copy.tsx";

const MAX_DEPTH = 50;

/** The text of a message. */
export const Markdown = memo(function Markdown({ text }: { text: string }) {
  return <div class="markdown">{nodes(parsed(text))}</div>;
});

/** Text that nests too deeply for the parser is one paragraph. */
function parsed(text: string): Token[] {
  try {
    const tokens = lexer(text);
    if (depthOf(tokens) <= MAX_DEPTH) return tokens;
  } catch {
    // The parser has no other error than a full stack.
  }
  return [{ type: "paragraph", raw: text, text }];
}

function depthOf(tokens: Token[]): number {
  const inner = (token: Token) => [...(("tokens" in token && token.tokens) || []), ...(("items" in token && token.items) || [])];
  return tokens.reduce((most, token) => Math.max(most, 1 + depthOf(inner(token))), 0);
}

function nodes(tokens: Token[] | undefined): ComponentChildren {
  return (tokens ?? []).map((token, index) => <Fragment key={index}>{node(token)}</Fragment>);
}

/** Inline content: the token's parts, or its text where it has none. */
function inside(token: { tokens?: Token[]; text?: string }): ComponentChildren {
  return token.tokens ? nodes(token.tokens) : decoded(token.text ?? "");
}

function node(token: Token): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return <p>{inside(token)}</p>;
    case "heading":
      return heading(token as Tokens.Heading);
    case "code":
      return <Code text={token.text} language={token.lang} />;
    case "blockquote":
      return <blockquote>{nodes(token.tokens)}</blockquote>;
    case "list":
      return list(token as Tokens.List);
    case "table":
      return table(token as Tokens.Table);
    case "hr":
      return <hr />;
    case "strong":
      return <strong>{inside(token)}</strong>;
    case "em":
      return <em>{inside(token)}</em>;
    case "del":
      return <del>{inside(token)}</del>;
    case "codespan":
      return <code>{token.text}</code>;
    case "br":
      return <br />;
    case "checkbox":
      return <input type="checkbox" disabled checked={token.checked} aria-label={token.checked ? "done" : "to do"} />;
    case "link":
      return <Link href={token.href}>{inside(token)}</Link>;
    case "image":
      // An image would be a request to another host.
      return <Link href={token.href}>{`[image: ${token.text || token.href}]`}</Link>;
    case "escape":
      return token.text;
    case "text":
      return inside(token);
    default:
      return token.raw;
  }
}

/** The page has headings of its own above those of a message. */
function heading({ depth, ...token }: Tokens.Heading): JSX.Element {
  const Tag = `h${Math.min(depth + 2, 6)}` as "h3";
  return <Tag>{inside(token)}</Tag>;
}

function list({ ordered, start, items }: Tokens.List): JSX.Element {
  const entries = items.map((item, index) => <li key={index}>{nodes(item.tokens)}</li>);
  return ordered ? <ol start={Number(start) || 1}>{entries}</ol> : <ul>{entries}</ul>;
}

function table({ header, rows }: Tokens.Table): JSX.Element {
  const cells = (row: Tokens.TableCell[]) =>
    row.map((cell, index) => {
      const Tag = cell.header ? "th" : "td";
      return <Tag key={index} class={cell.align ? `align-${cell.align}` : undefined}>{inside(cell)}</Tag>;
    });
  return (
    <div class="table" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead><tr>{cells(header)}</tr></thead>
        <tbody>{rows.map((row, index) => <tr key={index}>{cells(row)}</tr>)}</tbody>
      </table>
    </div>
  );
}

export function Code({ text, language }: { text: string; language?: string }) {
  return (
    <div class="code">
      <div class="code-head"><span>{language || "text"}</span><CopyButton text={text} label="Copy code" /></div>
      <pre tabIndex={0} aria-label="Code"><code>{language === "json" ? <Highlighted text={text} language="json" /> : text}</code></pre>
    </div>
  );
}

function Link({ href, children }: { href: string; children: ComponentChildren }) {
  const target = safe(href);
  return target ? <a href={target} target="_blank" rel="noopener noreferrer">{children}</a> : <>{children}</>;
}

/** The link's target if it leads to the web or to mail; script and data never run. */
export function safe(href: string): string | undefined {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : undefined;
  } catch {
    return undefined;
  }
}

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Text with its character references replaced. */
export function decoded(text: string): string {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
