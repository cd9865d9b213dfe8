import assert from "node:assert/strict";
import { test } from "node:test";
import { type OpenApi, type Parameter, parametersOf, rangeOf, valueOf } from "../src/parameter.ts";

const DOCUMENT: OpenApi = {
  paths: { "/route": { post: { requestBody: { content: { "application/json": { schema: { $ref: "#/components/schemas/Request" } } } } } } },
  components: {
    schemas: {
      Request: {
        allOf: [
          { $ref: "#/components/schemas/Part" },
          { properties: { messages: {}, user: { type: "string", description: "Accepted without effect." }, novel: { type: ["integer", "null"] } } },
        ],
      },
      Part: {
        properties: {
          top_p: { type: ["number", "null"], minimum: 0, maximum: 1, default: 1, description: "Nucleus." },
          stop: { oneOf: [{ type: "null" }, { $ref: "#/components/schemas/OneOrMany", description: "Ends." }] },
          stop_token_ids: { type: ["array", "null"], items: { type: "integer" } },
          logit_bias: { oneOf: [{ type: "object" }, { type: "null" }] },
        },
      },
      OneOrMany: { oneOf: [{ type: "string" }, { type: "array", items: { type: "string" } }], description: "Of all." },
    },
  },
};

test("parameters come from the document, in groups; unknown ones are shown too", () => {
  const groups = parametersOf(DOCUMENT, "/route");
  const kinds = groups.map(({ title, parameters }) => [title, ...parameters.map(({ name, kind }) => `${name} ${kind}`)]);
  assert.deepEqual(kinds, [
    ["Sampling", "top_p number"],
    ["Length", "stop texts", "stop_token_ids integers"],
    ["Penalties", "logit_bias json"],
    ["Other", "novel integer"],
  ]);
  assert.equal(groups[1]!.parameters[0]!.description, "Ends.");
});

const number = (range: Partial<Parameter>): Parameter => ({ name: "x", kind: "number", description: "", ...range });

test("ranges are told in words", () => {
  assert.equal(rangeOf(number({ minimum: 0, maximum: 1 })), "from 0 to 1");
  assert.equal(rangeOf(number({ minimum: 0 })), "at least 0");
  assert.equal(rangeOf(number({ exclusiveMinimum: 0, maximum: 1 })), "above 0 and at most 1");
  assert.equal(rangeOf(number({})), "");
});

test("values outside of a range are not sent", () => {
  const top = number({ minimum: 0, maximum: 1 });
  assert.deepEqual(valueOf(top, "0.5"), { value: 0.5 });
  assert.deepEqual(valueOf(top, "1.5"), { problem: "must be from 0 to 1" });
  assert.deepEqual(valueOf(top, "x"), { problem: "must be a number" });
  assert.deepEqual(valueOf(number({ exclusiveMinimum: 0 }), "0"), { problem: "must be above 0" });
  const seed = number({ kind: "integer" });
  assert.deepEqual(valueOf(seed, "-3"), { value: -3 });
  assert.ok("problem" in valueOf(seed, "1.5") && "problem" in valueOf(seed, "9007199254740993"));
});

test("lists and JSON are read from text", () => {
  const of = (kind: Parameter["kind"], text: string) => valueOf({ name: "x", kind, description: "" }, text);
  assert.deepEqual(of("texts", "one\ntwo\\n\\\\n"), { value: ["one", "two\n\\n"] });
  assert.deepEqual(of("integers", "1, 2 3"), { value: [1, 2, 3] });
  assert.deepEqual(of("integers", "1 x"), { problem: "must be token ids" });
  assert.deepEqual(of("json", '{"1": 2}'), { value: { 1: 2 } });
  assert.ok("problem" in of("json", "{"));
  assert.deepEqual(of("boolean", "false"), { value: false });
});
