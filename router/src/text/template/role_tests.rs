use serde_json::{Map, Value, json};

use super::super::compiled::Compiled;
use super::super::input::ChatInputs;

/// Writes `system` at any place, and no role that it does not know.
const ANYWHERE: &str = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
/// Writes `system` first only.
const FIRST: &str = "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}\
    {% for m in messages %}{% if m.role != 'system' or not loop.first %}{% if m.role in ['user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endif %}{% endfor %}";
/// Refuses `system`, and roles that do not alternate.
const REFUSING: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// Writes whatever role a message has.
const GENERIC: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// Writes the first message's instructions as the developer's, as gpt-oss does.
const DEVELOPER: &str = "{% set first = messages[0].role in ['developer', 'system'] %}{% if first %}<developer>{{ messages[0].content }}{% endif %}\
    {% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
/// Writes content as parts only.
const PARTS: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}\
    <{{ m.role }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}";

fn rendered(template: &str, messages: &[(&str, &str)]) -> String {
    let messages = messages.iter().map(|(role, text)| json!({"role": role, "content": text}));
    render(template, messages.collect())
}

fn render(template: &str, messages: Vec<Value>) -> String {
    let template = Compiled::new(template, Map::new(), jiff::Zoned::now).unwrap();
    let inputs = ChatInputs { messages, add_generation_prompt: Some(false), ..ChatInputs::default() };
    template.render_adapted(inputs).unwrap()
}

const REMINDER: &str = "<system-reminder>\nB\n</system-reminder>";

#[test]
fn a_developer_message_is_a_system_message_where_the_template_has_no_such_role() {
    for template in [ANYWHERE, FIRST, GENERIC] {
        assert_eq!(rendered(template, &[("developer", "A"), ("user", "1")]), "<system>A<user>1");
    }
    assert_eq!(rendered(DEVELOPER, &[("developer", "A"), ("user", "1")]), "<developer>A<user>1");
    assert_eq!(rendered(DEVELOPER, &[("system", "A"), ("user", "1")]), "<developer>A<user>1");
    assert_eq!(rendered(REFUSING, &[("developer", "A"), ("user", "1")]), "<user>A\n\n1");
}

#[test]
fn instructions_beside_others_are_one_message_where_the_template_writes_one() {
    let both = [("system", "A"), ("developer", "B"), ("user", "1")];
    assert_eq!(rendered(ANYWHERE, &both), "<system>A<system>B<user>1");
    assert_eq!(rendered(FIRST, &both), "<system>A\n\nB<user>1");
    assert_eq!(rendered(DEVELOPER, &both), "<developer>A\n\nB<user>1");
    assert_eq!(rendered(REFUSING, &both), "<user>A\n\nB\n\n1");
}

#[test]
fn later_instructions_are_reminders_where_the_template_writes_none() {
    let middle = [("user", "1"), ("assistant", "2"), ("developer", "B"), ("user", "3")];
    assert_eq!(rendered(ANYWHERE, &middle), "<user>1<assistant>2<system>B<user>3");
    for template in [FIRST, REFUSING, DEVELOPER] {
        let prompt = rendered(template, &middle);
        assert_eq!(prompt, format!("<user>1<assistant>2<user>{REMINDER}\n\n3"));
    }
    let after_user = [("user", "1"), ("system", "B"), ("user", "2"), ("assistant", "3"), ("user", "4")];
    assert_eq!(rendered(REFUSING, &after_user), format!("<user>1\n\n{REMINDER}\n\n2<assistant>3<user>4"));
    let last = [("user", "1"), ("assistant", "2"), ("developer", "B")];
    assert_eq!(rendered(REFUSING, &last), format!("<user>1<assistant>2<user>{REMINDER}"));
}

#[test]
fn a_reminder_follows_the_results_of_calls() {
    let messages = [("user", "1"), ("assistant", "2"), ("developer", "B"), ("tool", "3"), ("assistant", "4")];
    assert_eq!(rendered(FIRST, &messages), format!("<user>1<assistant>2<tool>3<user>{REMINDER}<assistant>4"));
}

#[test]
fn results_of_functions_are_those_of_tools_where_the_template_writes_no_functions() {
    let call = json!({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}});
    let result = json!({"role": "function", "name": "f", "content": "3"});
    let messages = vec![json!({"role": "user", "content": "1"}), call, result];
    const CALLS: &str = "{% for m in messages %}{% if m.role in ['user', 'assistant', 'tool'] %}<{{ m.role }}>{% for call in m.tool_calls or [] %}\
        {{ call.id }} {{ call.function.name }}{% endfor %}{{ m.tool_call_id }}{{ m.content }}{% endif %}{% endfor %}";
    assert_eq!(render(CALLS, messages.clone()), "<user>1<assistant>call00000 f<tool>call000003");
    assert_eq!(render(GENERIC, messages), "<user>1<assistant><function>3");
}

#[test]
fn a_message_that_the_template_drops_because_of_its_role_is_refused() {
    const NO_TOOL: &str =
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}";
    let refused = |template, role| {
        let template = Compiled::new(template, Map::new(), jiff::Zoned::now).unwrap();
        let last = json!({"role": role, "content": [{"type": "text", "text": "2"}], "tool_call_id": "call00000"});
        let messages = vec![json!({"role": "user", "content": "1"}), last];
        let inputs = ChatInputs { messages, ..ChatInputs::default() };
        template.render_adapted(inputs).unwrap_err().to_string()
    };
    let writes = "the model's chat template writes no messages of the role";
    assert_eq!(refused(ANYWHERE, "bot"), format!("{writes} \"bot\"; it writes system, user, assistant, tool"));
    for role in ["tool", "function", "human"] {
        assert_eq!(refused(NO_TOOL, role), format!("{writes} {role:?}; it writes user, assistant"));
    }
    let messages = [("user", "1"), ("bot", "2")];
    assert_eq!(rendered(GENERIC, &messages), "<user>1<bot>2");
    assert_eq!(rendered(ANYWHERE, &[("user", "1"), ("bot", " ")]), "<user>1");
}

#[test]
fn merged_contents_keep_their_parts() {
    let message = |role, parts: &[&str]| {
        let parts: Vec<_> = parts.iter().map(|text| json!({"type": "text", "text": text})).collect();
        json!({"role": role, "content": parts})
    };
    let messages = vec![
        message("system", &["A"]),
        message("developer", &["B"]),
        message("user", &["1", "2"]),
        message("developer", &["B"]),
    ];
    assert_eq!(render(PARTS, messages.clone()), format!("<system>A\n\nB<user>12\n\n{REMINDER}"));
    assert_eq!(render(REFUSING, messages), format!("<user>A\n\nB\n\n12\n\n{REMINDER}"));
}

#[test]
fn a_template_that_the_trial_cannot_render_gets_the_conversation_as_it_is() {
    let template = "{{ raise_exception('no tools') if not tools }}{% for m in messages %}<{{ m.role }}>{% endfor %}";
    let compiled = Compiled::new(template, Map::new(), jiff::Zoned::now).unwrap();
    let messages = ["system", "developer", "user", "system"].map(|role| json!({"role": role, "content": "A"}));
    let inputs = ChatInputs {
        messages: messages.to_vec(),
        tools: Some(vec![json!({})]),
        add_generation_prompt: Some(false),
        ..ChatInputs::default()
    };
    assert_eq!(compiled.render_adapted(inputs).unwrap(), "<system><developer><user><system>");
}
