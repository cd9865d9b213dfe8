// Hugging Face's JavaScript client, with only the address changed.
import assert from "node:assert/strict";
import { test } from "node:test";
import { InferenceClient } from "@huggingface/inference";

const client = new InferenceClient().endpoint(process.env.PENSTOCK_URL);
const messages = [{ role: "user", content: "What is the capital of Japan?" }];

// This client always uses /v1/completions for text generation and returns the raw chunks.
test("a text stream equals the plain answer", async () => {
  const request = { inputs: "The three primary colours are", parameters: { max_new_tokens: 16, temperature: 0 } };
  const plain = await client.textGeneration(request);
  assert.ok(plain.generated_text.length > 0);
  let text = "";
  for await (const chunk of client.textGenerationStream(request)) {
    text += chunk.choices[0]?.text ?? "";
  }
  assert.equal(text, plain.generated_text);
});

test("a chat stream equals the plain answer", async () => {
  const request = { messages, max_tokens: 40, temperature: 0 };
  const plain = await client.chatCompletion(request);
  assert.match(plain.choices[0].message.content, /Tokyo/);
  let text = "";
  for await (const chunk of client.chatCompletionStream(request)) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, plain.choices[0].message.content);
});
