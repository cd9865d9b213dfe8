// A conversation is a tree of messages: an edited question or a second answer is a sibling of the first. What the screen
// shows is one path from the root, which follows the chosen sibling of each message. Values are never changed in place.

export type Mode = "chat" | "completion";
export type Role = "user" | "assistant" | "tool";

export interface Alternative {
  text: string;
  logprob: number;
}

export interface Token extends Alternative {
  alternatives: Alternative[];
}

/** Draft tokens that a step verified. The `accepted` first ones are tokens of the answer, from `first` on. */
export interface Draft {
  /** Position among the message's tokens. */
  first: number;
  verified: number;
  accepted: number;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as the model writes it. */
  arguments: string;
}

/** What an answer cost. Times are milliseconds since the request was sent. */
export interface Cost {
  numChoices: number;
  firstTextAt?: number;
  lastTextAt?: number;
  numPromptTokens?: number;
  numCachedTokens?: number;
  /** Of all choices of the request together. */
  numTokens?: number;
}

export interface Message {
  id: string;
  parent: string | null;
  role: Role;
  content: string;
  reasoning?: string;
  calls?: ToolCall[];
  /** Of a tool's result: the call that it answers. */
  callId?: string;
  model?: string;
  tokens?: Token[];
  /** Of a server that drafts (`--speculate`), in the order of their tokens. */
  drafts?: Draft[];
  cost?: Cost;
  /** Why the answer ended; while it is missing, and there is no error, the answer is incomplete. */
  finish?: string;
  error?: string;
}

export interface Conversation {
  id: string;
  title: string;
  mode: Mode;
  /** When it last changed, as milliseconds of Unix time. */
  changed: number;
  messages: Map<string, Message>;
  /** The chosen child of a message; of `ROOT`: the first message. Without an entry, the newest child is chosen. */
  chosen: Map<string, string>;
}

export const ROOT = "";
const MAX_TITLE_LENGTH = 60;

export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(mode: Mode): Conversation {
  return { id: newId(), title: "", mode, changed: Date.now(), messages: new Map(), chosen: new Map() };
}

/** Adds a message, or replaces the one with its id, and chooses it. */
export function withMessage(conversation: Conversation, message: Message): Conversation {
  const messages = new Map(conversation.messages).set(message.id, message);
  const chosen = new Map(conversation.chosen).set(message.parent ?? ROOT, message.id);
  const title = conversation.title || titleOf(message.content);
  return { ...conversation, title, messages, chosen, changed: Date.now() };
}

/** Replaces messages that the conversation has. Leaves the choice of siblings as it is. */
export function withReplaced(conversation: Conversation, replacements: Message[]): Conversation {
  const messages = new Map(conversation.messages);
  for (const message of replacements) {
    if (messages.has(message.id)) messages.set(message.id, message);
  }
  return { ...conversation, messages, changed: Date.now() };
}

export function withChoice(conversation: Conversation, message: Message): Conversation {
  return { ...conversation, chosen: new Map(conversation.chosen).set(message.parent ?? ROOT, message.id) };
}

/** Removes a message and everything that follows it. */
export function without(conversation: Conversation, id: string): Conversation {
  const children = childrenOf(conversation);
  const messages = new Map(conversation.messages);
  const chosen = new Map(conversation.chosen);
  const parent = messages.get(id)?.parent ?? ROOT;
  if (chosen.get(parent) === id) chosen.delete(parent);
  const pending = [id];
  for (let next = pending.pop(); next !== undefined; next = pending.pop()) {
    messages.delete(next);
    chosen.delete(next);
    pending.push(...(children.get(next) ?? []).map((child) => child.id));
  }
  return { ...conversation, messages, chosen, changed: Date.now() };
}

/** A message on the path, and where it is among its siblings. */
export interface Place {
  message: Message;
  siblings: Message[];
}

/** The messages that the screen shows, first to last. */
export function shownPath(conversation: Conversation): Place[] {
  const children = childrenOf(conversation);
  const path: Place[] = [];
  let key = ROOT;
  for (;;) {
    const siblings = children.get(key);
    const last = siblings?.at(-1);
    if (!siblings || !last) return path;
    const message = siblings.find((sibling) => sibling.id === conversation.chosen.get(key)) ?? last;
    path.push({ message, siblings });
    key = message.id;
  }
}

/** The messages from the root to the one with this id. */
export function pathTo(conversation: Conversation, id: string | null): Message[] {
  const path: Message[] = [];
  for (let next = id; next !== null; ) {
    const message = conversation.messages.get(next);
    if (!message) break;
    path.push(message);
    next = message.parent;
  }
  return path.reverse();
}

function childrenOf(conversation: Conversation): Map<string, Message[]> {
  const children = new Map<string, Message[]>();
  for (const message of conversation.messages.values()) {
    const key = message.parent ?? ROOT;
    const siblings = children.get(key);
    if (siblings) siblings.push(message);
    else children.set(key, [message]);
  }
  return children;
}

function titleOf(text: string): string {
  const line = text.trim().split("\n", 1)[0] ?? "";
  return line.length > MAX_TITLE_LENGTH ? `${line.slice(0, MAX_TITLE_LENGTH - 1)}…` : line;
}
