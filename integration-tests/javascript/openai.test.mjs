// OpenAI's JavaScript SDK, with only the address changed.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.PENSTOCK_URL}/v1`, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of Japan?" }];
const chat = { model: "tgi", messages, max_tokens: 40, temperature: 0 };
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city", "unit"],
      },
    },
  },
];

test("a chat is answered", async () => {
  const answer = await client.chat.completions.create(chat);
  assert.match(answer.choices[0].message.content, /Tokyo/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a chat stream equals the plain answer", async () => {
  const plain = await client.chat.completions.create(chat);
  const runner = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
  const folded = await runner.finalChatCompletion();
  assert.equal(folded.choices[0].message.content, plain.choices[0].message.content);
  assert.deepEqual(folded.usage, plain.usage);
});

test("a required tool is called with valid arguments, plain and streamed", async () => {
  const request = {
    model: "tgi",
    messages: [{ role: "user", content: "What is the weather in Oslo?" }],
    tools,
    tool_choice: "required",
    parallel_tool_calls: false,
    max_tokens: 200,
    temperature: 0,
  };
  const plain = await client.chat.completions.create(request);
  assert.equal(plain.choices[0].finish_reason, "tool_calls");
  const [call] = plain.choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.ok(["celsius", "fahrenheit"].includes(JSON.parse(call.function.arguments).unit));
  const folded = await client.chat.completions.stream(request).finalChatCompletion();
  const [streamed] = folded.choices[0].message.tool_calls;
  assert.deepEqual(streamed.function, call.function);
});

test("an answer conforms to its schema", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 150 } },
    required: ["name", "age"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.create({
    ...chat,
    messages: [{ role: "user", content: "Invent a person." }],
    max_tokens: 100,
    response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  const person = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
  assert.ok(Number.isInteger(person.age));
});

test("a completion accepts several prompts", async () => {
  const answer = await client.completions.create({
    model: "tgi",
    prompt: ["One, two,", "The sky is"],
    max_tokens: 4,
    temperature: 0,
  });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
});

test("models are listed", async () => {
  const models = await client.models.list();
  assert.equal(models.data.length, 1);
  assert.equal((await client.models.retrieve(models.data[0].id)).id, models.data[0].id);
});

test("a bad request throws the SDK's BadRequestError", async () => {
  await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), OpenAI.BadRequestError);
});
