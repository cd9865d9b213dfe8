import assert from "node:assert/strict";
import { test } from "node:test";
import { type Language, partsOf } from "../src/highlight.tsx";

const kinds = (text: string, language: Language) =>
  partsOf(text, language).filter(({ kind }) => kind).map(({ text: part, kind }) => `${kind} ${part}`);

test("the parts are the whole text", () => {
  const texts = ['{"a": [1, -2.5e3, true, "x\\"y"]}', '{"open', "a[^]b-]+(?:c|\\d{2,3})?", 'start: "a"i // note\n  | /b+/x', "", "\\", "["];
  for (const text of texts) {
    for (const language of ["json", "regex", "lark"] as const) {
      assert.equal(partsOf(text, language).map((part) => part.text).join(""), text);
    }
  }
});

test("JSON has keys, texts, numbers and words", () => {
  assert.deepEqual(kinds('{"a\\"b" : "c", "d": -1e5}', "json"), [
    "sign {", 'key "a\\"b"', "sign :", 'text "c"', "sign ,", 'key "d"', "sign :", "number -1e5", "sign }",
  ]);
  assert.deepEqual(kinds("[true, nullable]", "json"), ["sign [", "word true", "sign ,", "sign ]"]);
});

test("a regular expression has classes, quantifiers, groups and escapes", () => {
  assert.deepEqual(kinds("(?:[^]a]+|\\.){2,}$", "regex"), [
    "sign (?:", "text [^]a]", "number +", "sign |", "word \\.", "sign )", "number {2,}", "word $",
  ]);
});

test("a grammar has rules, texts, expressions and comments", () => {
  assert.deepEqual(kinds('?start.1: "a" word* -> b # note\nword: /\\/x/i', "lark"), [
    "key ?start.1", "sign :", 'text "a"', "number *", "sign ->", "comment # note", "key word", "sign :", "word /\\/x/i",
  ]);
});

test("hostile text is scanned to its end", () => {
  for (const text of ['"\\'.repeat(9000), "[".repeat(19_000), "(?".repeat(9000), "/".repeat(19_000), "\\p{".repeat(6000), "a ".repeat(9000)]) {
    for (const language of ["json", "regex", "lark"] as const) {
      assert.equal(partsOf(text, language).reduce((sum, part) => sum + part.text.length, 0), text.length);
    }
  }
  assert.equal(partsOf("[".repeat(20_001), "regex").length, 1);
});
