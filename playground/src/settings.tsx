// Everything that a request can say beyond its messages.

import { useId, useRef } from "preact/hooks";
import { Highlighted, type Language } from "./highlight.tsx";
import { type Parameter, jsonOf, rangeOf, valueOf } from "./parameter.ts";
import { type FormatKind, MAX_ALTERNATIVES, toolNames } from "./request.ts";
import { change, changeParameter, info, modelNames, parameterGroups, settings } from "./state.ts";

const FORMATS: [FormatKind, string][] = [
  ["text", "Any text"], ["json_schema", "JSON schema"], ["json_object", "JSON object"], ["regex", "Regular expression"],
  ["choice", "One of several texts"], ["lark", "Lark grammar"],
];
const EXAMPLES: Partial<Record<FormatKind, string>> = {
  json_schema: JSON.stringify(
    { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] },
    null,
    2,
  ),
  regex: "[0-9]{4}-[0-9]{2}-[0-9]{2}",
  choice: "yes\nno",
  lark: 'start: "yes" | "no"',
};
const LANGUAGES: Partial<Record<FormatKind, Language>> = { json_schema: "json", regex: "regex", lark: "lark" };
const TOOL_EXAMPLE = JSON.stringify(
  [{
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather at a place.",
      parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
    },
  }],
  null,
  2,
);

export function SettingsPanel() {
  const { mode, model, system, logprobs, numAlternatives } = settings.value;
  const isChat = mode === "chat";
  return (
    <aside class="settings" aria-label="Settings">
      <label>Model
        <select value={model} onChange={(event) => change({ model: event.currentTarget.value })}>
          <option value="">{modelNames.value[0] ?? "the served model"}</option>
          {modelNames.value.slice(1).map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      {isChat && (
        <label>System message
          <textarea rows={3} value={system} onInput={(event) => change({ system: event.currentTarget.value })} />
        </label>
      )}
      <Format />
      {isChat && <Tools />}
      <label class="check">
        <input type="checkbox" checked={logprobs} onChange={(event) => change({ logprobs: event.currentTarget.checked })} />
        Ask for tokens with their probabilities
      </label>
      {logprobs && (
        <label>Alternatives of each token
          <input
            type="number"
            min={0}
            max={MAX_ALTERNATIVES[mode]}
            value={Math.min(numAlternatives, MAX_ALTERNATIVES[mode])}
            onInput={({ currentTarget: { valueAsNumber: typed } }) => {
              if (!Number.isNaN(typed)) change({ numAlternatives: Math.max(0, Math.floor(typed)) });
            }}
          />
        </label>
      )}
      {parameterGroups.value.map(({ title, parameters }, index) => (
        <details key={title} open={index < 2}>
          <summary>{title}</summary>
          {parameters.map((parameter) => <Field key={parameter.name} parameter={parameter} />)}
        </details>
      ))}
    </aside>
  );
}

function Format() {
  const { format, formatTexts } = settings.value;
  const text = formatTexts[format] ?? "";
  const problem = format === "json_schema" && text.trim() ? problemOf(jsonOf(text)) : "";
  const choose = (kind: FormatKind) => {
    const filled = formatTexts[kind] ?? EXAMPLES[kind];
    change({ format: kind, formatTexts: filled === undefined ? formatTexts : { ...formatTexts, [kind]: filled } });
  };
  return (
    <>
      <label>Answer format
        <select value={format} onChange={(event) => choose(event.currentTarget.value as FormatKind)}>
          {FORMATS.map(([kind, name]) => <option key={kind} value={kind}>{name}</option>)}
        </select>
      </label>
      {EXAMPLES[format] !== undefined && (
        <Editor
          label={FORMATS.find(([kind]) => kind === format)![1]}
          hint={format === "choice" ? "One text on each line." : ""}
          text={text}
          problem={problem}
          language={LANGUAGES[format]}
          onInput={(changed) => change({ formatTexts: { ...formatTexts, [format]: changed } })}
        />
      )}
    </>
  );
}

function Tools() {
  const { tools, toolChoice, parallelToolCalls } = settings.value;
  const names = toolNames(tools);
  const problem = tools.trim() ? problemOf(jsonOf(tools)) : "";
  return (
    <details>
      <summary>{names.length > 0 ? `Tools (${names.length})` : "Tools"}</summary>
      <Editor label="Tools as JSON" hint="" text={tools} problem={problem} language="json" onInput={(text) => change({ tools: text })} />
      {!tools.trim() && <button type="button" onClick={() => change({ tools: TOOL_EXAMPLE })}>Insert an example</button>}
      <label>Tool choice
        <select value={toolChoice} onChange={(event) => change({ toolChoice: event.currentTarget.value })}>
          {["auto", "none", "required", ...names].map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      <label class="check">
        <input type="checkbox" checked={parallelToolCalls} onChange={(event) => change({ parallelToolCalls: event.currentTarget.checked })} />
        Several calls in one answer
      </label>
    </details>
  );
}

interface EditorProperties {
  label: string;
  hint: string;
  text: string;
  problem: string;
  /** Undefined: plain text. */
  language: Language | undefined;
  onInput: (text: string) => void;
}

/** The text is a transparent `textarea` over its coloured copy, which has the same lines. */
function Editor({ label, hint, text, problem, language, onInput }: EditorProperties) {
  const id = useId();
  const copy = useRef<HTMLPreElement>(null);
  const isJson = language === "json";
  const parsed = isJson ? jsonOf(text) : undefined;
  const format = () => parsed && "value" in parsed && onInput(JSON.stringify(parsed.value, null, 2));
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <div class="highlighted">
        {/* A line end at the end of a `pre` is not shown. */}
        {language && <pre class="source" ref={copy} aria-hidden="true"><Highlighted text={`${text}\n`} language={language} /></pre>}
        <textarea
          id={id}
          class={language ? "source clear" : "source"}
          rows={Math.min(16, Math.max(3, text.split("\n").length))}
          spellcheck={false}
          aria-invalid={problem !== ""}
          aria-describedby={`${id}-note`}
          value={text}
          onInput={(event) => onInput(event.currentTarget.value)}
          onScroll={(event) => { if (copy.current) copy.current.scrollTop = event.currentTarget.scrollTop; }}
        />
      </div>
      {isJson && <button type="button" class="quiet" disabled={!parsed || "problem" in parsed} onClick={format}>Format</button>}
      <small id={`${id}-note`} class={problem ? "error" : undefined}>{problem || hint}</small>
    </div>
  );
}

const problemOf = (result: { value: unknown } | { problem: string }) => ("problem" in result ? result.problem : "");

/** Limits that only this server has, by the parameter that they are about. */
function limitOf(name: string): string {
  if (name === "stop" && info.value) return `At most ${info.value.max_stop_sequences}, one on each line; \\n is a line end.`;
  return "";
}

function Field({ parameter }: { parameter: Parameter }) {
  const id = useId();
  const { name, kind, description, minimum, maximum } = parameter;
  const text = settings.value.parameters[settings.value.mode][name] ?? "";
  const problem = text === "" ? "" : problemOf(valueOf(parameter, text));
  const set = (typed: string) => changeParameter(name, typed);
  const preset = parameter.default === undefined ? "" : String(parameter.default);
  const range = rangeOf(parameter);
  const common = { id, "aria-invalid": problem !== "", "aria-describedby": range ? `${id}-range ${id}-note` : `${id}-note` };
  const isBounded = kind === "number" && minimum !== undefined && maximum !== undefined;
  const about = [description.replaceAll("`", ""), limitOf(name)].filter(Boolean).join(" · ");
  return (
    <div class="field parameter">
      <label for={id}>{name}</label>
      {range && <small id={`${id}-range`} class="range">{range}</small>}
      {kind === "boolean" ? (
        <select {...common} value={text} onChange={(event) => set(event.currentTarget.value)}>
          <option value="">{preset ? `default (${preset})` : "default"}</option>
          <option value="true">true</option>
          <option value="false">false</option>
        </select>
      ) : kind === "number" || kind === "integer" ? (
        <>
          <input
            {...common}
            type="number"
            min={minimum}
            max={maximum}
            step={kind === "integer" ? 1 : "any"}
            placeholder={preset || "default"}
            value={text}
            onInput={(event) => set(event.currentTarget.value)}
          />
          {isBounded && (
            <input
              type="range"
              min={minimum}
              max={maximum}
              step={0.01}
              value={text || preset}
              aria-label={`${name} as a slider`}
              onInput={(event) => set(event.currentTarget.value)}
            />
          )}
        </>
      ) : kind === "text" || kind === "integers" ? (
        <input {...common} class="wide" type="text" placeholder="default" value={text} onInput={(event) => set(event.currentTarget.value)} />
      ) : (
        <textarea {...common} class="source wide" rows={2} placeholder="default" value={text} onInput={(event) => set(event.currentTarget.value)} />
      )}
      <small id={`${id}-note`} class={problem ? "wide error" : "wide"}>{problem ? `${name} ${problem}` : about}</small>
    </div>
  );
}
