// The parameters of a request, with their ranges, defaults and descriptions: read from the server's OpenAPI document, so
// that the page shows what this server accepts.

export type Kind = "number" | "integer" | "boolean" | "text" | "texts" | "integers" | "json";

export interface Parameter {
  name: string;
  kind: Kind;
  description: string;
  default?: unknown;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
}

export interface Group {
  title: string;
  parameters: Parameter[];
}

/** What the user typed, by the parameter's name. Empty text means: not sent. */
export type Typed = Record<string, string>;

const GROUPS: [title: string, names: string[]][] = [
  ["Sampling", ["temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "n"]],
  ["Length", ["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"]],
  ["Penalties", ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]],
  ["Prompt", ["truncate_prompt_tokens", "add_special_tokens", "skip_special_tokens", "echo", "continue_final_message"]],
  ["Template", ["reasoning_effort", "include_reasoning", "chat_template_kwargs", "documents", "tool_prompt"]],
  ["Service", ["priority", "timeout", "cache_salt"]],
];
const REST = "Other";
/** Set elsewhere on the page, an older name of another parameter, or without a meaning in a stream. */
const ELSEWHERE = new Set([
  "messages", "prompt", "model", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice",
  "parallel_tool_calls", "response_format", "grammar", "structured_outputs", "guided_json", "guided_regex",
  "guided_choice", "guided_grammar", "guided_whitespace_pattern", "max_completion_tokens", "best_of",
  "prompt_logprobs", "return_token_ids", "return_drafts", "add_generation_prompt",
]);
const WITHOUT_EFFECT = /^(Not supported|Accepted without effect|Only `text`)/;

interface Schema {
  $ref?: string;
  allOf?: Schema[];
  oneOf?: Schema[];
  type?: string | string[];
  properties?: Record<string, Schema>;
  items?: Schema;
  description?: string;
  default?: unknown;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
}

export interface OpenApi {
  paths: Record<string, { post?: { requestBody?: { content: Record<string, { schema: Schema }> } } }>;
  components: { schemas: Record<string, Schema> };
}

/** The parameters that the requests to this route may have. */
export function parametersOf(document: OpenApi, path: string): Group[] {
  const body = document.paths[path]?.post?.requestBody?.content["application/json"]?.schema;
  const fields = body ? properties(document, body) : new Map<string, Schema>();
  const found = new Map<string, Parameter>();
  for (const [name, schema] of fields) {
    const parameter = parameterOf(document, name, schema);
    if (!ELSEWHERE.has(name) && !WITHOUT_EFFECT.test(parameter.description)) found.set(name, parameter);
  }
  const groups = GROUPS.map(([title, names]) => ({ title, parameters: names.flatMap((name) => found.get(name) ?? []) }));
  const grouped = new Set(GROUPS.flatMap(([, names]) => names));
  const rest = [...found.values()].filter((parameter) => !grouped.has(parameter.name));
  return [...groups, { title: REST, parameters: rest }].filter((group) => group.parameters.length > 0);
}

function resolved(document: OpenApi, schema: Schema): Schema {
  const name = schema.$ref?.split("/").at(-1);
  return name === undefined ? schema : { ...document.components.schemas[name], ...schema, $ref: undefined };
}

function properties(document: OpenApi, schema: Schema): Map<string, Schema> {
  const whole = resolved(document, schema);
  const parts = (whole.allOf ?? []).flatMap((part) => [...properties(document, part)]);
  return new Map([...parts, ...Object.entries(whole.properties ?? {})]);
}

function parameterOf(document: OpenApi, name: string, schema: Schema): Parameter {
  const variants = (schema.oneOf ?? []).map((variant) => resolved(document, variant));
  const meant = variants.find((variant) => variant.type !== "null") ?? schema;
  const { minimum, maximum, exclusiveMinimum } = schema;
  return {
    name,
    kind: kindOf(document, meant),
    description: schema.description ?? meant.description ?? "",
    default: schema.default,
    minimum,
    maximum,
    exclusiveMinimum,
  };
}

function kindOf(document: OpenApi, schema: Schema): Kind {
  const types = [schema.type ?? []].flat();
  const type = types.find((name) => name !== "null");
  if (type === "number" || type === "integer" || type === "boolean") return type;
  if (type === "string") return "text";
  const items = schema.items ?? schema.oneOf?.find((variant) => variant.items)?.items;
  const ofItems = items && [resolved(document, items).type ?? []].flat()[0];
  if (ofItems === "string") return "texts";
  return ofItems === "integer" ? "integers" : "json";
}

/** The range in words, such as "from 0 to 1"; empty if there is none. */
export function rangeOf({ minimum, maximum, exclusiveMinimum }: Parameter): string {
  if (minimum !== undefined && maximum !== undefined) return `from ${minimum} to ${maximum}`;
  const low = minimum !== undefined ? `at least ${minimum}` : exclusiveMinimum !== undefined ? `above ${exclusiveMinimum}` : "";
  const high = maximum !== undefined ? `at most ${maximum}` : "";
  return [low, high].filter(Boolean).join(" and ");
}

/** The value to send for a non-empty text, or why there is none. */
export function valueOf(parameter: Parameter, text: string): { value: unknown } | { problem: string } {
  switch (parameter.kind) {
    case "number":
    case "integer":
      return numberOf(parameter, text);
    case "boolean":
      return { value: text === "true" };
    case "text":
      return { value: text };
    case "texts":
      return { value: text.split("\n").filter(Boolean).map(unescaped) };
    case "integers": {
      const parts = text.split(/[\s,]+/).filter(Boolean);
      return parts.every((part) => /^\d+$/.test(part)) ? { value: parts.map(Number) } : { problem: "must be token ids" };
    }
    case "json":
      return jsonOf(text);
  }
}

function numberOf(parameter: Parameter, text: string): { value: number } | { problem: string } {
  const value = Number(text);
  if (!Number.isFinite(value)) return { problem: "must be a number" };
  if (parameter.kind === "integer" && !Number.isSafeInteger(value)) {
    return { problem: `must be a whole number of at most ${Number.MAX_SAFE_INTEGER}` };
  }
  const { minimum = -Infinity, maximum = Infinity, exclusiveMinimum = -Infinity } = parameter;
  const fits = value >= minimum && value <= maximum && value > exclusiveMinimum;
  return fits ? { value } : { problem: `must be ${rangeOf(parameter)}` };
}

/** Parses JSON; the problem is what the browser says of it. */
export function jsonOf(text: string): { value: unknown } | { problem: string } {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { problem: (error as Error).message };
  }
}

/** A stop string is typed on one line, so a line end in it is typed as \n. */
function unescaped(text: string): string {
  return text.replace(/\\([nt\\])/g, (_, letter: string) => ({ n: "\n", t: "\t" })[letter] ?? letter);
}
