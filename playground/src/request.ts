// What the user set → the body of a request.

import { type Mode, type Message } from "./conversation.ts";
import { type Group, type Parameter, type Typed, jsonOf, valueOf } from "./parameter.ts";

export type FormatKind = "text" | "json_object" | "json_schema" | "regex" | "choice" | "lark";

export interface Settings {
  mode: Mode;
  /** Empty: the first that the server serves. */
  model: string;
  system: string;
  parameters: Record<Mode, Typed>;
  format: FormatKind;
  /** The text of each format's editor. */
  formatTexts: Partial<Record<FormatKind, string>>;
  tools: string;
  toolChoice: string;
  parallelToolCalls: boolean;
  logprobs: boolean;
  numAlternatives: number;
}

export const DEFAULTS: Settings = {
  mode: "chat",
  model: "",
  system: "",
  parameters: { chat: {}, completion: { max_tokens: "64" } },
  format: "text",
  formatTexts: {},
  tools: "",
  toolChoice: "auto",
  parallelToolCalls: true,
  logprobs: false,
  numAlternatives: 5,
};

/** Most alternatives of a token that a route gives. */
export const MAX_ALTERNATIVES: Record<Mode, number> = { chat: 20, completion: 5 };

export const PATHS: Record<Mode, string> = { chat: "v1/chat/completions", completion: "v1/completions" };

export type Body = Record<string, unknown>;

/** A setting that cannot be sent. */
export interface Problem {
  /** What the page calls the setting. */
  setting: string;
  problem: string;
}

/** The body of a request that answers these messages, and what is wrong with the settings. */
export function bodyOf(settings: Settings, groups: Group[], messages: Message[]): { body: Body; problems: Problem[] } {
  const problems: Problem[] = [];
  const body: Body = {};
  const set = (name: string, setting: string, result: { value: unknown } | { problem: string }) => {
    if ("problem" in result) problems.push({ setting, problem: result.problem });
    else body[name] = result.value;
  };
  if (settings.model) body.model = settings.model;
  if (settings.mode === "chat") {
    const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
    body.messages = [...system, ...messages.map(chatMessage)];
  } else {
    body.prompt = messages.map((message) => message.content).join("");
  }
  for (const parameter of groups.flatMap((group) => group.parameters)) {
    const text = settings.parameters[settings.mode][parameter.name] ?? "";
    if (text !== "") set(parameter.name, parameter.name, valueOf(parameter as Parameter, text));
  }
  if (settings.format !== "text") set("response_format", "Answer format", formatOf(settings));
  if (settings.mode === "chat" && settings.tools.trim()) {
    set("tools", "Tools", jsonOf(settings.tools));
    if (settings.toolChoice !== "auto") body.tool_choice = settings.toolChoice;
    if (!settings.parallelToolCalls) body.parallel_tool_calls = false;
  }
  if (settings.logprobs) {
    const num = Math.min(settings.numAlternatives, MAX_ALTERNATIVES[settings.mode]);
    body.return_drafts = true;
    Object.assign(body, settings.mode === "chat" ? { logprobs: true, top_logprobs: num } : { logprobs: num });
  }
  return { body, problems };
}

function chatMessage({ role, content, reasoning, calls, callId }: Message): Body {
  const functions = calls?.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return {
    role,
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    ...(functions && { tool_calls: functions }),
    ...(callId && { tool_call_id: callId }),
  };
}

function formatOf({ format, formatTexts }: Settings): { value: unknown } | { problem: string } {
  const text = formatTexts[format] ?? "";
  if (format === "json_object") return { value: { type: format } };
  if (!text.trim()) return { problem: "is empty" };
  if (format === "json_schema") {
    const schema = jsonOf(text);
    return "problem" in schema ? schema : { value: { type: format, json_schema: { name: "answer", schema: schema.value } } };
  }
  return { value: { type: format, value: format === "choice" ? text.split("\n").filter(Boolean) : text } };
}

/** The names of the tools in the editor; none if it holds no list of tools. */
export function toolNames(tools: string): string[] {
  const list = jsonOf(tools);
  if ("problem" in list || !Array.isArray(list.value)) return [];
  return list.value.map((tool) => tool?.function?.name).filter((name) => typeof name === "string");
}
