// Everything that a request can say beyond its messages.

import { useId } from "preact/hooks";
import { type Parameter, jsonOf, rangeOf, valueOf } from "./parameter.ts";
import { type FormatKind, MAX_ALTERNATIVES, toolNames } from "./request.ts";
import { change, changeParameter, info, modelNames, parameterGroups, settings } from "./state.ts";

const FORMATS: [FormatKind, string][] = [
  ["text", "Any text"], ["json_schema", "JSON schema"], ["json_object", "JSON object"], ["regex", "Regular expression"],
  ["choice", "One of several texts"], ["lark", "Lark grammar"],
];
const EXAMPLES: Partial<Record<FormatKind, string>> = {
  json_schema: '{\n  "type": "object",\n  "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},\n  "required": ["name", "age"]\n}',
  regex: "[0-9]{4}-[0-9]{2}-[0-9]{2}",
  choice: "yes\nno",
  lark: 'start: "yes" | "no"',
};
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
            onInput={(event) => change({ numAlternatives: Math.max(0, Math.floor(event.currentTarget.valueAsNumber || 0)) })}
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
          isJson={format === "json_schema"}
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
      <Editor label="Tools as JSON" hint="" text={tools} problem={problem} isJson onInput={(text) => change({ tools: text })} />
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
  isJson: boolean;
  onInput: (text: string) => void;
}

function Editor({ label, hint, text, problem, isJson, onInput }: EditorProperties) {
  const id = useId();
  const parsed = isJson ? jsonOf(text) : undefined;
  const format = () => parsed && "value" in parsed && onInput(JSON.stringify(parsed.value, null, 2));
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <textarea
        id={id}
        class="source"
        rows={Math.min(16, Math.max(3, text.split("\n").length))}
        spellcheck={false}
        aria-invalid={problem !== ""}
        aria-describedby={`${id}-note`}
        value={text}
        onInput={(event) => onInput(event.currentTarget.value)}
      />
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
  const common = { id, "aria-invalid": problem !== "", "aria-describedby": `${id}-note` };
  const isBounded = kind === "number" && minimum !== undefined && maximum !== undefined;
  const note = [description.replaceAll("`", ""), limitOf(name), rangeOf(parameter)].filter(Boolean).join(" · ");
  return (
    <div class="field parameter">
      <label for={id}>{name}</label>
      {kind === "boolean" ? (
        <select {...common} value={text} onChange={(event) => set(event.currentTarget.value)}>
          <option value="">{preset ? `default (${preset})` : "default"}</option>
          <option value="true">true</option>
          <option value="false">false</option>
        </select>
      ) : kind === "number" || kind === "integer" ? (
        <div class="row">
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
        </div>
      ) : kind === "text" || kind === "integers" ? (
        <input {...common} type="text" placeholder="default" value={text} onInput={(event) => set(event.currentTarget.value)} />
      ) : (
        <textarea {...common} class="source" rows={2} placeholder="default" value={text} onInput={(event) => set(event.currentTarget.value)} />
      )}
      <small id={`${id}-note`} class={problem ? "error" : undefined}>{problem || note}</small>
    </div>
  );
}
