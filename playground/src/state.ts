// What the page knows, as signals, and what the user can do to it.

import { computed, effect, signal } from "@preact/signals";
import {
  type Conversation, type Message, type Mode, newConversation, newId, pathTo, shownPath, withChoice, withMessage,
  withReplaced, without,
} from "./conversation.ts";
import { added } from "./delta.ts";
import { type Load } from "./load.ts";
import { type Group, parametersOf } from "./parameter.ts";
import { type Body, DEFAULTS, PATHS, type Settings, bodyOf } from "./request.ts";
import * as server from "./server.ts";
import * as store from "./store.ts";

const SETTINGS = "penstock-settings";
const THEME = "penstock-theme";
/** How often an answer that streams is shown, and how often it is saved. */
const SHOWN_EVERY_MS = 33;
/** A long answer, which takes long to show, is shown less often: one part of the time in this many goes into that. */
const SHOWN_PART = 4;
const SAVED_EVERY_MS = 2000;
const LOAD_EVERY_MS = 2000;
const NONE: ReadonlySet<string> = new Set();

export type Theme = "auto" | "light" | "dark";

export const settings = signal<Settings>(readSettings());
export const theme = signal<Theme>((localStorage.getItem(THEME) as Theme | null) ?? "auto");
export const heads = signal<store.Head[]>([]);
export const draft = signal("");
/** Why something that the user did not ask for failed, such as keeping the history. */
export const notice = signal("");
export const needsKey = signal(false);

export const info = signal<server.Info | undefined>(undefined);
export const modelNames = signal<string[]>([]);
export const load = signal<Load | undefined>(undefined);
/** Why the server accepts no requests; empty while it does. */
export const notReady = signal("");
const groups = signal<Record<Mode, Group[]>>({ chat: [], completion: [] });

/** The conversations that were opened since the page was loaded. */
const open = signal<Map<string, Conversation>>(new Map());
const currentId = signal("");
/** The requests that are running, by their conversation. */
const runs = signal<Map<string, Run>>(new Map());

interface Run {
  controller: AbortController;
  /** The messages that it writes. */
  ids: ReadonlySet<string>;
  ended: Promise<void>;
}

const empty = signal(newConversation(settings.value.mode));
export const current = computed(() => open.value.get(currentId.value) ?? empty.value);
export const path = computed(() => shownPath(current.value));
/** The messages of this conversation that are being written. */
export const runningIds = computed(() => runs.value.get(current.value.id)?.ids ?? NONE);
export const isRunning = computed(() => runningIds.value.size > 0);
/** The parameters of requests in the current mode. */
export const parameterGroups = computed(() => groups.value[settings.value.mode]);
export const problems = computed(() => bodyOf(settings.value, parameterGroups.value, []).problems);
/** False until the server has said what its parameters are. */
export const canSend = computed(() => info.value !== undefined && problems.value.length === 0);

effect(() => localStorage.setItem(SETTINGS, JSON.stringify(settings.value)));
effect(() => {
  localStorage.setItem(THEME, theme.value);
  document.documentElement.dataset.theme = theme.value;
});

function readSettings(): Settings {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

export function change(changes: Partial<Settings>): void {
  settings.value = { ...settings.value, ...changes };
}

export function changeParameter(name: string, text: string): void {
  const { mode, parameters } = settings.value;
  change({ parameters: { ...parameters, [mode]: { ...parameters[mode], [name]: text } } });
}

/** Reads the history, the served model and its parameters, and follows the server's load from then on. */
export async function begin(): Promise<void> {
  const read = async () => {
    heads.value = await store.heads();
    await openConversation(location.hash.slice(1));
  };
  addEventListener("hashchange", () => void openConversation(location.hash.slice(1)));
  await Promise.all([
    read().catch((error: Error) => { notice.value = `The history cannot be read: ${error.message}`; }),
    follow(),
  ]);
}

/** Asks what never changes while the server runs. */
async function ask(): Promise<void> {
  const [names, about, document] = await Promise.all([server.modelNames(), server.info(), server.openApi()]);
  modelNames.value = names;
  groups.value = { chat: parametersOf(document, `/${PATHS.chat}`), completion: parametersOf(document, `/${PATHS.completion}`) };
  if (!names.includes(settings.value.model)) change({ model: "" });
  info.value = about;
}

async function follow(): Promise<never> {
  for (;;) {
    if (!document.hidden) {
      try {
        if (!info.value) await ask();
        const [{ ready }, now] = await Promise.all([server.readiness(), server.load()]);
        notReady.value = ready.ok ? "" : (ready.reason ?? "not ready");
        load.value = now;
      } catch (error) {
        notReady.value = `no answer: ${(error as Error).message}`;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, LOAD_EVERY_MS));
  }
}

function update(conversation: Conversation): void {
  open.value = new Map(open.value).set(conversation.id, conversation);
  if (conversation.id === empty.value.id) {
    currentId.value = conversation.id;
    empty.value = newConversation(settings.value.mode);
    history.replaceState(null, "", `#${conversation.id}`);
  }
}

async function keep(conversation: Conversation): Promise<void> {
  const others = heads.value.filter((head) => head.id !== conversation.id);
  heads.value = [store.headOf(conversation), ...others];
  await store.save(conversation).catch((error: Error) => { notice.value = `The history is not kept: ${error.message}`; });
}

export function newChat(mode: Mode = settings.value.mode): void {
  change({ mode });
  empty.value = newConversation(mode);
  currentId.value = "";
  history.replaceState(null, "", "#");
}

/** In an empty conversation only its mode changes; otherwise a new one begins. */
export function changeMode(mode: Mode): void {
  if (mode !== settings.value.mode) newChat(mode);
}

export async function openConversation(id: string): Promise<void> {
  const found = id ? (open.value.get(id) ?? (await store.read(id))) : undefined;
  if (!found) return;
  open.value = new Map(open.value).set(id, found);
  currentId.value = id;
  change({ mode: found.mode });
  history.replaceState(null, "", `#${id}`);
}

export async function removeConversation(id: string): Promise<void> {
  runs.value.get(id)?.controller.abort();
  await store.remove(id);
  forget((head) => head.id === id);
}

export async function removeHistory(): Promise<void> {
  for (const { controller } of runs.value.values()) controller.abort();
  await store.removeAll();
  forget(() => true);
}

function forget(isGone: (head: { id: string }) => boolean): void {
  heads.value = heads.value.filter((head) => !isGone(head));
  open.value = new Map([...open.value].filter(([, conversation]) => !isGone(conversation)));
  if (!open.value.has(currentId.value)) newChat();
}

/** Sends the draft. In a completion without a draft, the model continues the text. */
export async function send(): Promise<void> {
  const text = draft.value;
  const leaf = path.value.at(-1)?.message;
  const isContinuation = current.value.mode === "completion" && leaf && !text;
  if (isRunning.value || !canSend.value || !(text.trim() || isContinuation)) return;
  draft.value = "";
  await (isContinuation ? answer(leaf.id) : say({ role: "user", content: text, parent: leaf?.id ?? null }));
}

async function say(message: Omit<Message, "id">): Promise<void> {
  const whole = { ...message, id: newId() };
  update(withMessage(current.value, whole));
  await answer(whole.id);
}

/** An edited question is asked again; an edited answer stays as it is. */
export async function edit(message: Message, content: string): Promise<void> {
  const { role, parent, callId } = message;
  if (role !== "assistant") return say({ role, content, parent, callId });
  update(withMessage(current.value, { ...message, id: newId(), content, tokens: undefined, cost: undefined, finish: "edited" }));
  await keep(current.value);
}

export function regenerate(message: Message): Promise<void> {
  return answer(message.parent);
}

/** Gives the results of the calls of `message` to the model, in the calls' order. */
export async function giveResults(message: Message, results: string[]): Promise<void> {
  let parent = message.id;
  for (const [index, content] of results.entries()) {
    const result: Message = { id: newId(), role: "tool", content, parent, callId: message.calls?.[index]?.id };
    update(withMessage(current.value, result));
    parent = result.id;
  }
  await answer(parent);
}

export async function choose(message: Message): Promise<void> {
  update(withChoice(current.value, message));
  await keep(current.value);
}

export async function removeMessage(message: Message): Promise<void> {
  await ended(current.value.id);
  update(without(current.value, message.id));
  await keep(current.value);
}

export function stop(): void {
  runs.value.get(current.value.id)?.controller.abort();
}

/** Stops what is running in a conversation, and waits for its end. */
async function ended(id: string): Promise<void> {
  const run = runs.value.get(id);
  run?.controller.abort();
  await run?.ended;
}

/** The request that answers the message with this id. */
export function requestFor(conversation: Conversation, id: string | null): Body {
  const asked = { ...settings.value, mode: conversation.mode, model: settings.value.model || (modelNames.value[0] ?? "") };
  return bodyOf(asked, groups.value[conversation.mode], pathTo(conversation, id)).body;
}

/** Answers a message, after stopping the answer that the conversation is waiting for. */
async function answer(parent: string | null): Promise<void> {
  const { id, mode } = current.value;
  if (!canSend.value) return;
  if (runs.value.has(id)) await ended(id);
  const conversation = open.value.get(id);
  if (!conversation) return;
  const body = requestFor(conversation, parent);
  const choices = typeof body.n === "number" ? body.n : 1;
  const answers: Message[] = Array.from({ length: choices }, () => ({ id: newId(), parent, role: "assistant", content: "" }));
  update(withChoice(answers.reduce(withMessage, conversation), answers[0]!));

  const controller = new AbortController();
  const run = { controller, ids: new Set(answers.map((message) => message.id)), ended: stream(id, mode, body, answers, controller.signal) };
  runs.value = new Map(runs.value).set(id, run);
  void keep(open.value.get(id)!);
  await run.ended;
}

/** Fills the answers of a conversation with those of the server. Failures become part of the answers. */
async function stream(id: string, mode: Mode, body: Body, empty: Message[], signal: AbortSignal): Promise<void> {
  let answers = empty;
  const began = performance.now();
  let nextShowAt = began;
  let savedAt = began;
  /** The conversation with the answers so far; undefined if the user has deleted it. */
  const show = (): Conversation | undefined => {
    const conversation = open.value.get(id);
    if (conversation) update(withReplaced(conversation, answers));
    return open.value.get(id);
  };
  try {
    for await (const chunk of server.chunks(PATHS[mode], body, signal)) {
      const now = performance.now();
      answers = added(answers, chunk, mode, now - began);
      if (now < nextShowAt) continue;
      const conversation = show();
      await new Promise((resolve) => setTimeout(resolve));
      const taken = performance.now() - now;
      nextShowAt = now + Math.max(SHOWN_EVERY_MS, SHOWN_PART * taken);
      if (conversation && now - savedAt > SAVED_EVERY_MS) {
        savedAt = now;
        void keep(conversation);
      }
    }
  } catch (error) {
    const failure = error as Error;
    const ending = failure.name === "AbortError" ? { finish: "stopped" } : { error: failure.message };
    answers = answers.map((message) => (message.finish ? message : { ...message, ...ending }));
    if (failure instanceof server.ServerError && failure.status === 401) needsKey.value = true;
  }
  runs.value = new Map([...runs.value].filter(([other]) => other !== id));
  const conversation = show();
  if (conversation) await keep(conversation);
}
