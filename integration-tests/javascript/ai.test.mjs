// Vercel's AI SDK, whose providers validate every field of an answer, with only the addresses changed.
import assert from "node:assert/strict";
import { suite, test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createHuggingFace } from "@ai-sdk/huggingface";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const address = { baseURL, apiKey: "-" };
const openai = createOpenAI(address);
const compatible = createOpenAICompatible({ ...address, name: "penstock", includeUsage: true, supportsStructuredOutputs: true });
const models = {
  "openai's responses": openai("tgi"),
  "openai's chats": openai.chat("tgi"),
  "openai-compatible": compatible("tgi"),
  anthropic: createAnthropic(address)("tgi"),
  huggingface: createHuggingFace(address)("tgi"),
};
const prompt = "What is the capital of Japan?";
const schema = z.object({ capital: z.string().max(20), population: z.number().int().min(0).max(99) });

for (const [name, model] of Object.entries(models)) {
  // The SDK tries three times by default, which would hide what fails once.
  const common = { model, temperature: 0, maxRetries: 0 };
  const question = { ...common, prompt, maxOutputTokens: 40 };
  const weather = {
    ...common,
    prompt: "What is the weather in Oslo?",
    maxOutputTokens: 200,
    toolChoice: "required",
    tools: {
      get_weather: tool({
        description: "The weather in a city",
        inputSchema: z.object({ city: z.string().max(20), unit: z.enum(["celsius", "fahrenheit"]) }),
      }),
    },
  };

  suite(name, () => {
    test("a stream equals the plain answer", async () => {
      const plain = await generateText(question);
      assert.match(plain.text, /Tokyo/);
      assert.equal(plain.finishReason, "stop");
      const streamed = streamText({ ...question, onError: ({ error }) => assert.fail(error) });
      assert.equal(await streamed.text, plain.text);
      assert.equal(await streamed.finishReason, plain.finishReason);
      assert.equal((await streamed.usage).outputTokens, plain.usage.outputTokens);
      assert.ok(plain.usage.inputTokens > 0 && plain.usage.outputTokens > 0);
    });

    test("an object conforms to its schema, plain and streamed", async () => {
      const request = { ...common, schema, prompt, maxOutputTokens: 100 };
      const plain = await generateObject(request);
      assert.deepEqual(Object.keys(plain.object).sort(), ["capital", "population"]);
      const streamed = streamObject({ ...request, onError: ({ error }) => assert.fail(error) });
      for await (const _ of streamed.partialObjectStream);
      assert.deepEqual(await streamed.object, plain.object);
    });

    test("a tool is called with valid arguments, plain and streamed", async () => {
      const plain = await generateText(weather);
      // Hugging Face's provider knows no reason of its own for calls.
      assert.equal(plain.finishReason, name === "huggingface" ? "stop" : "tool-calls");
      const [call] = plain.toolCalls;
      assert.equal(call.toolName, "get_weather");
      assert.ok(["celsius", "fahrenheit"].includes(call.input.unit));
      const streamed = streamText({ ...weather, onError: ({ error }) => assert.fail(error) });
      assert.deepEqual((await streamed.toolCalls)[0].input, call.input);
    });

    // Hugging Face's provider leaves the results of tools out.
    test("the result of a tool is answered", { skip: name === "huggingface" }, async () => {
      const { get_weather } = weather.tools;
      const answered = await generateText({
        ...weather,
        tools: { get_weather: { ...get_weather, execute: async () => "4 degrees, rain" } },
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
        stopWhen: stepCountIs(2),
      });
      assert.equal(answered.steps.length, 2);
      assert.ok(answered.text.length > 0);
    });
  });
}
