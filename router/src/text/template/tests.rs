use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::compiled::Compiled;
use super::*;

fn template(source: &str) -> Compiled {
    compile(source).unwrap()
}

fn compile(source: &str) -> Result<Compiled, TemplateError> {
    let tokens = json!({"bos_token": "<s>", "eos_token": "</s>"});
    Compiled::new(source, tokens.as_object().unwrap().clone(), jiff::Zoned::now)
}

fn inputs(messages: Value) -> ChatInputs {
    ChatInputs { messages: messages.as_array().unwrap().clone(), ..ChatInputs::default() }
}

fn render(source: &str, messages: Value) -> Result<String, TemplateError> {
    compile(source)?.render_adapted(inputs(messages))
}

fn hello() -> Value {
    json!([{"role": "user", "content": "Hello <&> \"you\""}])
}

fn unfinished_answer() -> Value {
    json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}])
}

const STRINGS: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>\n{% endfor %}{{ '[assistant]' if add_generation_prompt }}";
const PARTS: &str =
    "{% for m in messages %}{% for part in m.content %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endfor %}";
const EITHER: &str = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
    {% for part in m['content'] %}<{{ part['type'] }}>{{ part.text }}{% endfor %}{% endif %}{% endfor %}";

#[test]
fn a_trial_shows_what_follows_an_answer() {
    let source =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ eos_token }}";
    let tokens = [("</s>".to_owned(), 2), ("<|im_start|>".to_owned(), 3), ("<|im_end|>".to_owned(), 4)].into();
    let compiled = template(source);
    let after = &compiled.traits().after_answer;
    assert_eq!(after.turn_end(&tokens, &[2]), Some(4));
    assert_eq!(after.turn_end(&tokens, &[2, 4]), None);
}

#[test]
fn whitespace_around_blocks_is_trimmed_as_by_transformers() {
    let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if true %}\n{{ m.content | trim }}\n    {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source, hello()).unwrap(), "<s>\nHello <&> \"you\"\nend");
}

#[test]
fn the_message_of_raise_exception_is_reported() {
    let error = render("{{ raise_exception('roles must alternate') }}", hello()).unwrap_err();
    assert!(error.to_string().contains("roles must alternate"), "{error}");
    assert!(matches!(render("{% if %}", hello()), Err(TemplateError::Invalid(_))));
}

#[test]
fn a_trailing_assistant_message_is_continued_unless_the_request_says_otherwise() {
    let continued = "[user] Hi</s>\n[assistant] Well,";
    assert_eq!(render(STRINGS, unfinished_answer()).unwrap(), continued);
    let with = |adds, continues| {
        let endings = ChatInputs {
            add_generation_prompt: adds,
            continue_final_message: continues,
            ..inputs(unfinished_answer())
        };
        template(STRINGS).render_adapted(endings)
    };
    assert_eq!(with(None, Some(true)).unwrap(), format!("{continued} "));
    assert_eq!(with(Some(false), Some(true)).unwrap(), format!("{continued} "));
    assert_eq!(with(Some(true), None).unwrap(), format!("{continued} </s>\n[assistant]"));
    assert_eq!(with(None, Some(false)).unwrap(), format!("{continued} </s>\n[assistant]"));
    assert_eq!(with(Some(false), None).unwrap(), format!("{continued} </s>\n"));
    assert_eq!(with(Some(true), Some(true)).unwrap_err(), TemplateError::TwoEndings);
}

#[test]
fn a_message_that_the_template_does_not_write_unchanged_cannot_be_continued() {
    let without_content = "{% for m in messages %}{{ m.role }}{% endfor %}";
    assert_eq!(render(without_content, unfinished_answer()).unwrap_err(), TemplateError::NotContinuable);
    let explicit = |source, messages| {
        template(source)
            .render_adapted(ChatInputs { continue_final_message: Some(true), ..inputs(messages) })
            .unwrap_err()
    };
    assert_eq!(explicit(without_content, unfinished_answer()), TemplateError::NotContinuable);
    assert_eq!(explicit("{{ messages[0].content }}", unfinished_answer()), TemplateError::NotContinuable);
    assert_eq!(explicit(STRINGS, json!([{"role": "assistant"}])), TemplateError::NothingToContinue);
    assert_eq!(explicit(STRINGS, json!([])), TemplateError::NothingToContinue);
}

#[test]
fn content_is_converted_to_a_shape_that_the_template_supports() {
    let string = json!([{"role": "user", "content": "ab"}]);
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    let rendered = |source, messages: &Value| render(source, messages.clone()).unwrap();
    assert_eq!(rendered(STRINGS, &parts), rendered(STRINGS, &string));
    assert_eq!(rendered(STRINGS, &string), "[user] ab</s>\n[assistant]");
    assert_eq!(
        (rendered(PARTS, &parts), rendered(PARTS, &string)),
        ("<text>a<text>b".to_owned(), "<text>ab".to_owned())
    );
    assert_eq!((rendered(EITHER, &parts), rendered(EITHER, &string)), ("<text>a<text>b".to_owned(), "ab".to_owned()));
    let image =
        json!([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]}]);
    let shown = ChatInputs { image_text: Some("<image>".to_owned()), ..inputs(image) };
    assert_eq!(template(STRINGS).render_adapted(shown).unwrap(), "[user] <image>a<image></s>\n[assistant]");
}

#[test]
fn arguments_of_calls_are_objects_unless_the_template_concatenates_them() {
    let calls = |arguments: Value| json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}]);
    let generation = |source, messages| {
        template(source).render_adapted(ChatInputs { add_generation_prompt: Some(true), ..inputs(messages) }).unwrap()
    };
    let loops = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}";
    let object = format!("{loops}{{{{ call.function.arguments | tojson }}}}{{% endfor %}}{{% endfor %}}");
    let string = format!("{loops}{{{{ 'json: ' + call.function.arguments }}}}{{% endfor %}}{{% endfor %}}");
    let text = json!("{\"z\": 1,\"a\": \"é\"}");
    assert_eq!(generation(&object, calls(text.clone())), "{\"z\": 1, \"a\": \"é\"}");
    assert_eq!(generation(&object, calls(json!({"z": 1}))), "{\"z\": 1}");
    assert_eq!(generation(&object, calls(json!("not json"))), "\"not json\"");
    assert_eq!(generation(&object, calls(json!("[1]"))), "\"[1]\"");
    assert_eq!(generation(&string, calls(text)), "json: {\"z\": 1,\"a\": \"é\"}");
}

#[test]
fn each_role_gets_content_in_a_shape_that_the_template_writes_for_it() {
    // The user's parts are written one by one, the system's content as it is, a tool's as JSON.
    let source = "{% for m in messages %}[{% if m.role == 'user' and m.content is not string %}\
        {% for part in m.content %}<{{ part.text }}>{% endfor %}{% elif m.role == 'tool' %}{{ m.content | tojson }}\
        {% elif m.role == 'assistant' %}{{ m.content[0].text if m.content is not string else m.content }}\
        {% else %}{{ m.content }}{% endif %}]{% endfor %}";
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let roles = ["system", "user", "assistant", "tool", "developer"];
    let messages: Value = roles.iter().map(|role| json!({"role": role, "content": parts})).collect();
    assert_eq!(render(source, messages).unwrap(), "[ab][<a><b>][ab][\"ab\"][ab]");
}

#[test]
fn arguments_that_a_template_would_write_as_python_are_json() {
    let source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\
        {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | string }}}</tool_call>{% endfor %}{% endfor %}";
    let calls = json!([{"id": "call00000", "function": {"name": "f", "arguments": "{\"a\": true}"}}]);
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]);
    let inputs = ChatInputs { add_generation_prompt: Some(false), ..inputs(messages) };
    let text = template(source).render_adapted(inputs).unwrap();
    assert_eq!(text, "Hi<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": true}}</tool_call>");
}

#[test]
fn what_a_template_shows_is_tried_out() {
    let tags = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let traits = |source: &str| {
        let compiled = template(source);
        let traits = compiled.traits();
        (traits.shows_tools, traits.format.clone())
    };
    assert_eq!(traits(tags), (false, None));
    assert_eq!(traits(&format!("{{# tools <tool_call> #}}{tags}")), (false, None));
    assert_eq!(traits(&format!("{{{{ tools }}}}{tags}")), (true, None));
    let instruction = "Answer <tool_call>{\"name\": NAME, \"arguments\": ARGUMENTS}</tool_call>";
    assert_eq!(
        traits(&format!("{{% if tools %}}{{{{ tools }}}}{instruction}{{% endif %}}{tags}")),
        (true, Some("hermes".into()))
    );
    let in_xml = "Answer <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>";
    assert_eq!(
        traits(&format!("{{% if tools %}}{{{{ tools }}}}{in_xml}{{% endif %}}{tags}")),
        (true, Some("qwen-xml".into()))
    );
    let unknown =
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c }}>{% endfor %}{% endfor %}";
    assert_eq!(traits(&format!("{{{{ tools }}}}{unknown}")), (true, None));
}

#[test]
fn a_template_that_writes_some_arguments_wrongly_is_known_by_the_others() {
    let traits = |value: &str| {
        let source = format!(
            "{{% for m in messages %}}{{{{ m.content }}}}{{% if m.tool_calls %}}[{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}(\
             {{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}={value}{{{{ ', ' if not loop.last }}}}{{% endfor %}})\
             {{{{ ', ' if not loop.last }}}}{{% endfor %}}]{{% endif %}}{{% endfor %}}"
        );
        let traits = template(&source).traits().clone();
        (traits.format, traits.parallel_calls)
    };
    for value in ["\"{{ v }}\"", "{{ v }}"] {
        assert_eq!(traits(value), (Some("python".to_owned()), true), "{value}");
    }
}

#[test]
fn a_template_that_refuses_two_calls_gets_one() {
    let source = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}\
        [TOOL_CALLS]{{ m.tool_calls[0].function.name }}[ARGS]{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}";
    let compiled = template(source);
    assert_eq!((compiled.traits().format.as_deref(), compiled.traits().parallel_calls), (Some("mistral"), false));
}

#[test]
fn a_template_of_the_form_of_llama_3_writes_one_call_in_its_format() {
    let source = "{{ tools | tojson if tools }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{% if m.tool_calls %}\
        {% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{% set c = m.tool_calls[0].function %}\
        {\"name\": \"{{ c.name }}\", \"parameters\": {{ c.arguments | tojson }}}\
        {% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}";
    let compiled = template(source);
    assert_eq!((compiled.traits().format.as_deref(), compiled.traits().parallel_calls), (Some("llama"), false));
}

#[test]
fn kwargs_are_variables_and_cannot_replace_a_field_of_the_request() {
    let with = |kwargs: Value| {
        let kwargs = kwargs.as_object().unwrap().clone();
        template("{{ bos_token }}{{ mode }}").render_adapted(ChatInputs { kwargs, ..inputs(hello()) })
    };
    assert_eq!(with(json!({"mode": "x", "bos_token": "<B>"})).unwrap(), "<B>x");
    for name in ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"] {
        assert_eq!(with(json!({name: 1})).unwrap_err(), TemplateError::ReservedKwarg(name.to_owned()));
    }
}

#[test]
fn an_endless_template_is_stopped() {
    let numbers = "range(100000)";
    let endless = format!("{{% for a in {numbers} %}}{{% for b in {numbers} %}}{{% endfor %}}{{% endfor %}}");
    assert_eq!(render(&endless, hello()).unwrap_err(), TemplateError::TooExpensive);
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(render(recursive, hello()).is_err());
}

#[test]
fn a_panic_of_minijinja_is_an_error() {
    assert!(matches!(
        render("{% for m in messages %}{{ loop.cycle() }}{% endfor %}", hello()),
        Err(TemplateError::Invalid(_))
    ));
}

#[test]
fn a_conversation_of_3001_messages_is_within_the_operation_limit() {
    let roles = ["user", "assistant"].into_iter().cycle().take(3001);
    let messages: Vec<Value> = roles.map(|role| json!({"role": role, "content": "Hi"})).collect();
    for name in ["reasoning_calls", "channels", "model_role", "listed_calls"] {
        let rendered = family(name).render_adapted(inputs(messages.clone().into()));
        assert!(rendered.is_ok(), "{name}: {rendered:?}");
    }
}

#[test]
fn dates_are_formatted() {
    assert_eq!(render("{{ strftime_now('%d %b %Y') | length }}", hello()).unwrap(), "11");
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "(role|content|user|assistant|text|[\\PC\\n{%}]{0,6})".prop_map(Value::from),
    ];
    let name = "(role|content|tool_calls|function|arguments|type|text|name|id|items|.)";
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..5).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn family(name: &str) -> Compiled {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates/family");
    template(&std::fs::read_to_string(folder.join(name).with_extension("jinja")).unwrap())
}

thread_local! {
    static FAMILIES: Vec<Compiled> =
        ["reasoning_calls", "channels", "dated_calls", "listed_calls", "model_role", "documents", "modes", "image_parts"].map(family).into();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn rendering_never_panics(
        messages in prop::collection::vec(any_json(), 0..4),
        tools in prop::option::of(prop::collection::vec(any_json(), 0..3)),
        documents in prop::option::of(any_json()),
        continue_final_message in prop::option::of(any::<bool>()),
    ) {
        let inputs = ChatInputs { messages, tools, documents, continue_final_message, ..ChatInputs::default() };
        FAMILIES.with(|families| {
            for family in families {
                let _either = family.render_adapted(inputs.clone());
            }
        });
    }
}

#[test]
fn tools_reach_a_template_where_it_reads_them() {
    let tool = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}});
    let render = |source: &str| {
        let inputs =
            ChatInputs { tools: Some(vec![tool.clone()]), ..inputs(json!([{"role": "user", "content": "Hi"}])) };
        let template = template(source);
        (template.traits().shows_tools, template.render_adapted(inputs).unwrap())
    };
    let in_system = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\
        {% if m.role == 'system' and 'tools' in m %}<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}";
    let functions = "[{\"name\": \"now\", \"parameters\": {\"type\": \"object\"}}]";
    assert_eq!(render(in_system), (true, format!("<|system|><|tool|>{functions}<|/tool|><|user|>Hi")));
    let in_variable = "{% for t in xml_tools or [] %}{{ t.function.name }};{% endfor %}\
        {% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(render(in_variable), (true, "now;Hi".to_owned()));
}
