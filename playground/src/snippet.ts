// A request as a command line or a program that gives the same answer.

import { type Mode } from "./conversation.ts";
import { type Body, PATHS } from "./request.ts";

const KEY_VARIABLE = "PENSTOCK_API_KEY";
/** Fields that OpenAI's package has as arguments; others go into `extra_body`. */
const ARGUMENTS: Record<Mode, ReadonlySet<string>> = {
  chat: new Set([
    "model", "messages", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "parallel_tool_calls",
    "presence_penalty", "reasoning_effort", "response_format", "seed", "stop", "temperature", "tool_choice", "tools",
    "top_logprobs", "top_p",
  ]),
  completion: new Set([
    "model", "prompt", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty",
    "seed", "stop", "temperature", "top_p",
  ]),
};

/** `base` is the server's URL with a slash at the end. The key itself is never shown. */
export function curl(base: string, mode: Mode, body: Body, hasKey: boolean): string {
  const lines = [
    `curl ${quoted(base + PATHS[mode])}`,
    "-H 'content-type: application/json'",
    ...(hasKey ? [`-H "authorization: Bearer $${KEY_VARIABLE}"`] : []),
    `-d ${quoted(JSON.stringify(body, null, 2))}`,
  ];
  return lines.join(" \\\n  ");
}

/** A program for OpenAI's package. */
export function python(base: string, mode: Mode, body: Body, hasKey: boolean): string {
  const known = Object.entries(body).filter(([name]) => ARGUMENTS[mode].has(name));
  const extra = Object.entries(body).filter(([name]) => !ARGUMENTS[mode].has(name));
  const values = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (extra.length > 0) values.push(`    extra_body=${literal(Object.fromEntries(extra), "    ")},`);
  const key = hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  const method = mode === "chat" ? "chat.completions" : "completions";
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=${key})`,
    `answer = client.${method}.create(`,
    ...values,
    ")",
    `print(answer.choices[0].${mode === "chat" ? "message.content" : "text"})`,
  ].join("\n");
}

function quoted(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A JSON value in Python's notation. */
function literal(value: unknown, indent: string): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length === 0 ? `${open}${close}` : `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}
