import assert from "node:assert/strict";
import { test } from "node:test";
import { events } from "../src/sse.ts";

async function read(...parts: Uint8Array[]): Promise<string[]> {
  async function* body() {
    yield* parts;
  }
  const all: string[] = [];
  for await (const data of events(body())) all.push(data);
  return all;
}

test("events are the same wherever the bytes are cut", async () => {
  const bytes = new TextEncoder().encode(': comment\r\n\r\ndata: {"a":"é€😀"}\n\ndata:two\ndata: lines\n\nid: 1\ndata: [DONE]\n\ndata: unfinished');
  const expected = ['{"a":"é€😀"}', "two\nlines", "[DONE]"];
  for (let cut = 0; cut <= bytes.length; cut++) {
    assert.deepEqual(await read(bytes.slice(0, cut), bytes.slice(cut)), expected);
  }
});
