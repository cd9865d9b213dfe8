// The client of the server that this page came from. All URLs are relative to the page's, which is `/` or `/playground`.

import { type Chunk } from "./delta.ts";
import { type Load, loadOf } from "./load.ts";
import { type OpenApi } from "./parameter.ts";
import { type Body } from "./request.ts";
import { events } from "./sse.ts";

const KEY = "penstock-key";

export interface Info {
  model_id: string;
  max_input_tokens: number;
  max_total_tokens: number;
  max_stop_sequences: number;
  max_concurrent_requests: number;
  version: string;
}

export interface Readiness {
  ready: { ok: boolean; reason?: string };
}

/** The server refused a request, or a stream ended with an error. */
export class ServerError extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

/** The API key is kept until the tab is closed, and never beyond. */
export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const info = () => json<Info>("info");
export const openApi = () => json<OpenApi>("api-doc/openapi.json");
export const modelNames = async () => (await json<{ data: { id: string }[] }>("v1/models")).data.map(({ id }) => id);

/** Also answered with 503, with the reason. */
export async function readiness(): Promise<Readiness> {
  return (await fetch("health/ready")).json();
}

export async function load(): Promise<Load> {
  return loadOf(await (await checked(await fetch("metrics"))).text());
}

/** Sends a request whose answer is a stream, and yields its chunks. Throws `ServerError`, and `AbortError` after `signal`. */
export async function* chunks(path: string, body: Body, signal: AbortSignal): AsyncGenerator<Chunk> {
  const key = apiKey();
  const response = await checked(
    await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
      signal,
    }),
  );
  for await (const data of events(read(response.body!))) {
    if (data === "[DONE]") return;
    const chunk: Chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(response.status, chunk.error.message ?? "the generation failed");
    yield chunk;
  }
  throw new ServerError(response.status, "the connection ended before the answer did");
}

/** Not every browser can iterate over a stream. */
async function* read(stream: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array> {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

async function json<T>(path: string): Promise<T> {
  return (await checked(await fetch(path))).json();
}

async function checked(response: Response): Promise<Response> {
  if (response.ok) return response;
  const text = await response.text();
  let message = text || response.statusText;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? message;
  } catch {
    // The body is not JSON.
  }
  const seconds = response.headers.get("retry-after");
  throw new ServerError(response.status, seconds ? `${message} (try again in ${seconds} s)` : message);
}
