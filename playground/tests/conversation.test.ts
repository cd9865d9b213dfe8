import assert from "node:assert/strict";
import { test } from "node:test";
import { type Conversation, newConversation, pathTo, shownPath, withChoice, withMessage, withReplaced, without } from "../src/conversation.ts";

function conversation(...messages: [id: string, parent: string | null][]): Conversation {
  return messages.reduce(
    (sum, [id, parent]) => withMessage(sum, { id, parent, role: "user", content: `text of ${id}` }),
    newConversation("chat"),
  );
}

const shown = (of: Conversation) => shownPath(of).map(({ message }) => message.id).join(" ");

test("the newest version is shown, and a chosen one instead", () => {
  const tree = conversation(["q", null], ["a", "q"], ["b", "a"], ["a2", "q"]);
  assert.equal(shown(tree), "q a2");
  const chosen = withChoice(tree, tree.messages.get("a")!);
  assert.equal(shown(chosen), "q a b");
  assert.deepEqual(shownPath(chosen)[1]!.siblings.map(({ id }) => id), ["a", "a2"]);
  assert.equal(shown(tree), "q a2", "the old value is as it was");
});

test("a first message can have versions too", () => {
  const tree = conversation(["q", null], ["a", "q"], ["q2", null]);
  assert.equal(shown(tree), "q2");
  assert.equal(shown(withChoice(tree, tree.messages.get("q")!)), "q a");
});

test("replacing a message does not choose it", () => {
  const tree = conversation(["q", null], ["a", "q"], ["a2", "q"]);
  const replaced = withReplaced(tree, [{ ...tree.messages.get("a")!, content: "new" }, { id: "gone", parent: "q", role: "user", content: "" }]);
  assert.equal(shown(replaced), "q a2");
  assert.equal(replaced.messages.get("a")!.content, "new");
  assert.equal(replaced.messages.has("gone"), false);
});

test("removing a message removes what follows it, and shows its sibling", () => {
  const tree = conversation(["q", null], ["a", "q"], ["a2", "q"], ["b", "a2"], ["c", "b"]);
  const rest = without(tree, "a2");
  assert.equal(shown(rest), "q a");
  assert.deepEqual([...rest.messages.keys()], ["q", "a"]);
});

test("a path leads from the root to a message", () => {
  const tree = conversation(["q", null], ["a", "q"], ["a2", "q"]);
  assert.deepEqual(pathTo(tree, "a").map(({ id }) => id), ["q", "a"]);
  assert.deepEqual(pathTo(tree, null), []);
});

test("the title is the first line of the first message, shortened", () => {
  assert.equal(conversation(["q", null], ["a", "q"]).title, "text of q");
  const long = withMessage(newConversation("chat"), { id: "q", parent: null, role: "user", content: `${"x".repeat(80)}\nmore` });
  assert.equal(long.title, `${"x".repeat(59)}…`);
});
