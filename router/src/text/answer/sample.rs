//! Tool calls as the model families write them: small templates of our own in each format, for tests.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::expected::Expected;
use super::format::{CallIds, Format};
use super::reasoning::ReasoningState;
use super::table::FORMATS;
use super::tool::Tool;
use crate::text::template::{ChatInputs, Compiled};

const PRELUDE: &str = "{%- macro raw(v) %}{{ v if v is string else v | tojson }}{% endmacro %}\
    {%- macro gemma(v, quote) %}{% if v is string %}{{ quote ~ v ~ quote }}{% elif v is mapping %}{{ '{' }}\
    {%- for k, x in v.items() %}{{ k }}:{{ gemma(x, quote) }}{{ ',' if not loop.last }}{% endfor %}}\
    {%- elif v is sequence %}[{% for x in v %}{{ gemma(x, quote) }}{{ ',' if not loop.last }}{% endfor %}]\
    {%- else %}{{ v | tojson }}{% endif %}{% endmacro %}\
    {%- macro python(v) %}{{ 'True' if v is true else 'False' if v is false else 'None' if v is none else v | tojson }}{% endmacro %}\
    {%- macro call(c, key='arguments', name='name') %}{\"{{ name }}\": {{ c.name | tojson }}, \"{{ key }}\": {{ c.arguments | tojson }}}{% endmacro %}\
    {%- macro list(calls) %}[{% for c in calls %}{{ call(c.function) }}{{ ', ' if not loop.last }}{% endfor %}]{% endmacro %}\
    {%- macro dsml(calls) %}{% for c in calls %}<｜DSML｜invoke name=\"{{ c.function.name }}\">\n{% for k, v in c.function.arguments.items() %}\
    <｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ raw(v) }}</｜DSML｜parameter>\n\
    {%- endfor %}</｜DSML｜invoke>\n{% endfor %}{% endmacro %}\
    {%- macro element(v) %}{% if v is mapping %}{% for k, x in v.items() if x is not none %}]<]minimax[>[<{{ k }}>{{ element(x) }}]<]minimax[>[</{{ k }}>{% endfor %}\
    {%- elif v is iterable and v is not string %}{% for x in v %}]<]minimax[>[<item>{{ element(x) }}]<]minimax[>[</item>{% endfor %}\
    {%- elif v is boolean %}{{ v | tojson }}{% elif v is not none %}{{ v }}{% endif %}{% endmacro %}\
    {%- macro type(v) %}{{ 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else 'string' if v is string else 'object' if v is mapping else 'array' }}{% endmacro %}";

/// For each format, what a template writes for a message's calls.
const CALLS: [(&str, &str); 46] = [
    (
        "hermes",
        "{% for c in calls %}<tool_call>\n{{ call(c.function) }}\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "qwen-xml",
        "{% for c in calls %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ raw(v) ~ '\n' }}</parameter>\n{% endfor %}</function>\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "glm",
        "{% for c in calls %}\n<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ raw(v) }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}",
    ),
    (
        "longcat",
        "{% for c in calls %}<longcat_tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<longcat_arg_key>{{ k }}</longcat_arg_key>\n<longcat_arg_value>{{ raw(v) }}</longcat_arg_value>\n{% endfor %}</longcat_tool_call>\n{% endfor %}",
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    ),
    (
        "kimi-k3",
        "<|open|>tools<|sep|>{% for c in calls %}<|open|>call tool=\"{{ c.function.name }}\" index=\"{{ loop.index }}\"<|sep|>{% for k, v in c.function.arguments.items() %}<|open|>argument key=\"{{ k }}\" type=\"{{ type(v) }}\"<|sep|>{{ raw(v) }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
    ),
    (
        "deepseek-fenced",
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>",
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    ),
    ("dsml", "<｜DSML｜function_calls>\n{{ dsml(calls) }}</｜DSML｜function_calls>"),
    ("dsml-tools", "<｜DSML｜tool_calls>\n{{ dsml(calls) }}</｜DSML｜tool_calls>"),
    ("tool-calls-lines", "<tool_calls>\n{% for c in calls %}{{ call(c.function) }}\n{% endfor %}</tool_calls>"),
    (
        "tool-calls-list",
        "<tool_calls>[{% for c in calls %}{{ call(c.function)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>",
    ),
    (
        "minimax",
        "<minimax:tool_call>\n{% for c in calls %}<invoke name=\"{{ c.function.name }}\">\n{% for k, v in c.function.arguments.items() %}<parameter name=\"{{ k }}\">{{ raw(v) }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    ),
    (
        "minimax-m3",
        "]<]minimax[>[<tool_call>\n{% for c in calls %}]<]minimax[>[<invoke name=\"{{ c.function.name }}\">{{ element(c.function.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>",
    ),
    (
        "seed",
        "{% for c in calls %}<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ raw(v) }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
    ),
    (
        "step",
        "<｜tool_calls_begin｜>{% for c in calls %}<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments.items() %}<steptml:parameter name=\"{{ k }}\">{{ raw(v) }}</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜>{% endfor %}<｜tool_calls_end｜>",
    ),
    (
        "hunyuan",
        "<tool_calls>\n{% for c in calls %}<tool_call>{{ c.function.name }}<tool_sep>\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ raw(v) }}</arg_value>\n{% endfor %}</tool_call>\n{% endfor %}</tool_calls>",
    ),
    (
        "hunyuan-opensource",
        "<tool_calls:opensource>\n{% for c in calls %}<tool_call:opensource>{{ c.function.name }}<tool_sep:opensource>\n{% for k, v in c.function.arguments.items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>{{ raw(v) }}</arg_value:opensource>\n{% endfor %}</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>",
    ),
    (
        "minicpm",
        "{% for c in calls %}<function name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments.items() %}<param name=\"{{ k }}\">{{ raw(v) }}</param>{% endfor %}</function>{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "harmony",
        "{% for c in calls %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
    ),
    (
        "functionary",
        "{% for c in calls %}>>>{{ c.function.name ~ '\n' }}{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    (
        "atem",
        "{% for c in calls %}<|start|>assistant to={{ c.function.name }}<|message|><atem:function_calls>\n<atem:invoke name=\"{{ c.function.name }}\">\n{% for k, v in c.function.arguments.items() %}<atem:parameter name=\"{{ k }}\">{{ raw(v) }}</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}",
    ),
    (
        "function-tag",
        "{% for c in calls %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>{% endfor %}",
    ),
    (
        "function-call",
        "{% for c in calls %}<function_call> {{ call(c.function) }}{{ '\n' if not loop.last }}{% endfor %}",
    ),
    ("phi", "<|tool_call|>{{ list(calls) }}<|/tool_call|>"),
    ("functools", "functools{{ list(calls) }}"),
    ("granite", "<|tool_call|>{{ list(calls) }}"),
    (
        "internlm",
        "{% for c in calls %}<|action_start|><|plugin|>\n{{ call(c.function) }}<|action_end|>{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "gigachat-token",
        "{% for c in calls %}<|function_call|>{{ call(c.function) }}{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "gigachat",
        "{% for c in calls %}function call<|role_sep|>\n{{ call(c.function) }}{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "solar",
        "<|tool_calls|>{% for c in calls %}<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}<|tool_call:end|>{% endfor %}",
    ),
    (
        "apertus",
        "<|tools_prefix|>[{% for c in calls %}{ {{- c.function.name | tojson }}: {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>",
    ),
    (
        "command",
        "<|START_ACTION|>[\n{% for c in calls %}    {\"tool_call_id\": \"{{ loop.index0 }}\", {{ call(c.function, 'parameters', 'tool_name')[1:] }}{{ ',' if not loop.last }}\n{% endfor %}]<|END_ACTION|>",
    ),
    (
        "command-r",
        "Action: ```json\n[\n{% for c in calls %}    {{ call(c.function, 'parameters', 'tool_name') }}{{ ',' if not loop.last }}\n{% endfor %}]\n```",
    ),
    (
        "lfm",
        "<|tool_call_start|>[{% for c in calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ python(v) }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
    ),
    ("toolcall", "<TOOLCALL>{{ list(calls) }}</TOOLCALL>"),
    (
        "gemma",
        "{% for c in calls %}<|tool_call>call:{{ c.function.name }}{{ gemma(c.function.arguments, '<|\"|>') }}<tool_call|>{% endfor %}",
    ),
    (
        "function-gemma",
        "{% for c in calls %}<start_function_call>call:{{ c.function.name }}{{ gemma(c.function.arguments, '<escape>') }}<end_function_call>{% endfor %}",
    ),
    (
        "mistral-list",
        "[TOOL_CALLS] [{% for c in calls %}{{ call(c.function)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last }}{% endfor %}]",
    ),
    (
        "mistral",
        "{% for c in calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    (
        "mistral-id",
        "{% for c in calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    ("llama4", "{% for c in calls %}{{ call(c.function, 'parameters') }}{% endfor %}"),
    ("llama", "{% for c in calls %}{{ call(c.function, 'parameters') }}{{ '; ' if not loop.last }}{% endfor %}"),
    (
        "python",
        "[{% for c in calls %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ python(v) }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
    ),
    ("json-list", "{{ list(calls) }}"),
    ("json", "{% for c in calls %}{{ call(c.function) }}{{ '\n' if not loop.last }}{% endfor %}"),
];

thread_local! {
    static TEMPLATES: RefCell<HashMap<&'static str, Compiled>> = RefCell::default();
}

pub(super) fn formats() -> impl Iterator<Item = &'static Format> {
    assert_eq!(CALLS.len(), FORMATS.len(), "every format has a sample");
    CALLS.iter().map(|(name, _)| Format::named(name).unwrap())
}

fn source(format: &Format) -> &'static str {
    CALLS.iter().find(|(name, _)| *name == format.name()).unwrap().1
}

/// A chat template that writes messages, calls and tools.
pub(super) fn chat_template(format: &Format) -> String {
    format!(
        "{PRELUDE}{{%- if tools %}}{{{{ tools | tojson }}}}\n{{% endif %}}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n\
         {{{{ m.content }}}}{{%- set calls = m.tool_calls %}}{{% if calls %}}{}{{% endif %}}<|im_end|>\n{{% endfor %}}",
        source(format)
    )
}

pub(super) fn compiled(source: &str) -> Compiled {
    Compiled::new(source, serde_json::Map::new(), jiff::Zoned::now).unwrap()
}

/// A run of calls in this format. The arguments are JSON objects.
pub(super) fn written(format: &'static Format, calls: &[(&str, &str)]) -> String {
    let call = |(index, (name, arguments)): (usize, &(&str, &str))| {
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        let id = match format.ids {
            CallIds::Written => format!("functions.{name}:{index}"),
            CallIds::Prefixed | CallIds::Nine => format!("call0000{index}"),
            CallIds::Ten => format!("call00000{index}"),
        };
        json!({"id": id, "function": {"name": name, "arguments": arguments}})
    };
    let calls: Vec<_> = calls.iter().enumerate().map(call).collect();
    let inputs = ChatInputs {
        messages: vec![json!({"role": "assistant", "tool_calls": calls})],
        add_generation_prompt: Some(false),
        ..ChatInputs::default()
    };
    TEMPLATES.with_borrow_mut(|templates| {
        let source = || format!("{PRELUDE}{{%- set calls = messages[0].tool_calls %}}{}", source(format));
        let template = templates.entry(format.name()).or_insert_with(|| compiled(&source()));
        template.render(inputs).unwrap().trim().to_owned()
    })
}

pub(super) fn tool(name: &str, properties: Value) -> Tool {
    Tool { name: name.to_owned(), parameters: Some(json!({"type": "object", "properties": properties})) }
}

/// What the parser expects of an answer that may call these tools.
pub(super) fn expected(format: Option<&'static Format>, tools: &[Tool], reasoning_state: ReasoningState) -> Expected {
    let tools: Arc<[Tool]> = tools.into();
    Expected { calls: format, tools, reasoning_state, reply: None, only_calls: false }
}
