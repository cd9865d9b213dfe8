import assert from "node:assert/strict";
import { test } from "node:test";
import { type Message } from "../src/conversation.ts";
import { added, tokensPerSecond } from "../src/delta.ts";
import { acceptance, placesInDrafts } from "../src/draft.ts";
import { loadOf } from "../src/load.ts";
import { DEFAULTS, type Settings, bodyOf, toolNames } from "../src/request.ts";
import { curl, python } from "../src/snippet.ts";

const message = (role: Message["role"], content: string, more: Partial<Message> = {}): Message => ({ id: content, parent: null, role, content, ...more });
const GROUPS = [{ title: "Sampling", parameters: [{ name: "top_p", kind: "number" as const, description: "", minimum: 0, maximum: 1 }] }];
const body = (changes: Partial<Settings>, ...messages: Message[]) => bodyOf({ ...DEFAULTS, ...changes }, GROUPS, messages);

test("a chat's body has the messages, calls and results", () => {
  const calls = [{ id: "1", name: "f", arguments: "{}" }];
  const { body: sent, problems } = body(
    { system: "Be brief.", parameters: { chat: { top_p: "0.5" }, completion: {} } },
    message("user", "Hi"),
    message("assistant", "", { calls, reasoning: "Hm" }),
    message("tool", "4", { callId: "1" }),
  );
  assert.deepEqual(problems, []);
  assert.deepEqual(sent, {
    messages: [
      { role: "system", content: "Be brief." },
      { role: "user", content: "Hi" },
      { role: "assistant", content: "", reasoning_content: "Hm", tool_calls: [{ id: "1", type: "function", function: { name: "f", arguments: "{}" } }] },
      { role: "tool", content: "4", tool_call_id: "1" },
    ],
    top_p: 0.5,
  });
});

test("a completion's prompt is the whole text", () => {
  const settings = { mode: "completion" as const, parameters: { chat: {}, completion: {} }, logprobs: true, numAlternatives: 9 };
  assert.deepEqual(body(settings, message("user", "One "), message("assistant", "two")).body, { prompt: "One two", logprobs: 5, return_drafts: true });
});

test("formats and tools are checked before they are sent", () => {
  const format = (kind: Settings["format"], text: string) => body({ format: kind, formatTexts: { [kind]: text } });
  assert.deepEqual(format("json_schema", "{}").body.response_format, { type: "json_schema", json_schema: { name: "answer", schema: {} } });
  assert.deepEqual(format("regex", "a+").body.response_format, { type: "regex", value: "a+" });
  assert.deepEqual(format("choice", "a\n\nb").body.response_format, { type: "choice", value: ["a", "b"] });
  assert.deepEqual(format("json_object", "").body.response_format, { type: "json_object" });
  assert.equal(format("regex", " ").problems[0]!.problem, "is empty");
  assert.equal(format("json_schema", "{").problems[0]!.setting, "Answer format");
  assert.equal(body({ tools: "[" }).problems[0]!.setting, "Tools");
  assert.equal(body({ parameters: { chat: { top_p: "2" }, completion: {} } }).problems[0]!.setting, "top_p");
  assert.deepEqual(toolNames('[{"function": {"name": "f"}}, {}]'), ["f"]);
});

test("chunks become answers, one for each choice", () => {
  let answers = [message("assistant", ""), message("assistant", "")];
  const add = (chunk: object, at: number) => { answers = added(answers, chunk, "chat", at); };
  add({ model: "m", choices: [{ index: 0, delta: { role: "assistant", reasoning_content: "Hm" } }] }, 100);
  add({ choices: [{ index: 1, delta: { tool_calls: [{ index: 0, id: "1", function: { name: "f", arguments: "" } }] } }] }, 150);
  add({ choices: [{ index: 1, delta: { tool_calls: [{ index: 0, function: { arguments: "{}" } }] }, finish_reason: "tool_calls" }] }, 200);
  const logprobs = { content: [{ token: "Hi", logprob: -0.1, top_logprobs: [{ token: "Hi", logprob: -0.1 }] }] };
  add({ choices: [{ index: 0, delta: { content: "Hi" }, logprobs, finish_reason: "stop" }], usage: { prompt_tokens: 9, completion_tokens: 12 } }, 1100);
  const [one, other] = answers;
  assert.deepEqual([one!.content, one!.reasoning, one!.finish, one!.model], ["Hi", "Hm", "stop", "m"]);
  assert.deepEqual(one!.tokens, [{ text: "Hi", logprob: -0.1, alternatives: [{ text: "Hi", logprob: -0.1 }] }]);
  assert.deepEqual([other!.calls, other!.finish], [[{ id: "1", name: "f", arguments: "{}" }], "tool_calls"]);
  assert.equal(one!.cost!.firstTextAt, 100);
  assert.equal(tokensPerSecond(one!.cost!), 10, "10 tokens after the first of each choice, in 1 s");
});

test("a completion's alternatives are sorted", () => {
  const logprobs = { tokens: ["a"], token_logprobs: [-2], top_logprobs: [{ a: -2, b: -1 }] };
  const [answer] = added([message("assistant", "")], { choices: [{ index: 0, text: "a", logprobs }] }, "completion", 1);
  assert.deepEqual(answer!.tokens, [{ text: "a", logprob: -2, alternatives: [{ text: "b", logprob: -1 }, { text: "a", logprob: -2 }] }]);
});

test("drafts begin at the generated token of their chunk", () => {
  let answers = [message("assistant", "")];
  const add = (texts: string[], drafts?: object[]) => {
    const logprobs = { tokens: texts, token_logprobs: texts.map(() => -1) };
    answers = added(answers, { choices: [{ index: 0, text: texts.join(""), logprobs, drafts }] } as never, "completion", 1);
  };
  add(["the", " prompt", " a"], [{ token_index: 0, verified: 3, accepted: 1 }]);
  add([" b"]);
  add([" c"], [{ token_index: 2, verified: 1, accepted: 0 }]);
  add([" d"], [{ token_index: 3, verified: 2, accepted: 2 }]);
  const drafts = answers[0]!.drafts!;
  assert.deepEqual([...placesInDrafts(drafts)], [[2, 1], [5, 1], [6, 2]]);
  assert.deepEqual(acceptance(drafts), [{ verified: 3, accepted: 2 }, { verified: 2, accepted: 1 }, { verified: 1, accepted: 0 }]);
  assert.deepEqual(acceptance([]), []);
});

test("the load comes from the metrics", () => {
  const load = loadOf("# TYPE x gauge\ntgi_queue_size 3\npenstock_kv_blocks 8\npenstock_kv_free_blocks 6\npenstock_prefix_queried_tokens 10\npenstock_prefix_hit_tokens 5\n");
  assert.deepEqual([load.numQueued, load.kvUsed, load.prefixHits, load.numRunning], [3, 0.25, 0.5, 0]);
  assert.equal(loadOf("").prefixHits, undefined);
});

test("snippets quote what the user wrote and never show the key", () => {
  const sent = { messages: [{ role: "user", content: "it's \"$HOME\"" }], top_k: 3, stop: null, logprobs: true };
  assert.equal(
    curl("http://h/", "chat", { prompt: "it's" }, true),
    `curl 'http://h/v1/chat/completions' \\\n  -H 'content-type: application/json' \\\n  -H "authorization: Bearer $PENSTOCK_API_KEY" \\\n  -d '{\n  "prompt": "it'\\''s"\n}'`,
  );
  const code = python("http://h/", "chat", sent, false);
  assert.match(code, /logprobs=True,\n/);
  assert.match(code, /extra_body=\{\n {8}"top_k": 3,\n {4}\},/);
  assert.match(code, /api_key="none"/);
});
