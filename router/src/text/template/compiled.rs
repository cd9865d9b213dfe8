//! A compiled template, with the environment and the variables that transformers gives it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::machinery::{self, CodeGenerator, Instructions, Vm, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde_json::Map;

use super::continuation::PromptEnd;
use super::error::TemplateError;
use super::input::ChatInputs;
use super::limit::MAX_OPERATIONS;
use super::probe::{Probe, TemplateTraits};
use super::python_value::invalid;
use super::role::SupportedRoles;
use super::shape::SupportedShapes;
use super::{continuation, filter, method, operator, python_str, sequence_filter, source, syntax, text_filter};

const NAME: &str = "chat_template";

/// Variables set from the request's own fields; `chat_template_kwargs` must not contradict them.
const RESERVED: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"];

pub(in crate::text) struct Compiled {
    program: Program,
    special_tokens: Map<String, serde_json::Value>,
    writes_content: bool,
    roles: SupportedRoles,
    shapes: SupportedShapes,
    traits: TemplateTraits,
}

impl Compiled {
    /// `clock`: returns the time that `strftime_now` formats.
    pub(in crate::text) fn new(
        source: &str,
        special_tokens: Map<String, serde_json::Value>,
        clock: fn() -> jiff::Zoned,
    ) -> Result<Self, TemplateError> {
        let mut compiled = Self::untried(source, special_tokens, clock)?;
        // One endless rendering is enough to know the template.
        let is_endless = Cell::new(false);
        let render = |inputs| {
            let rendered = (!is_endless.get()).then(|| compiled.render(inputs))?;
            is_endless.set(matches!(rendered, Err(TemplateError::TooExpensive)));
            rendered.ok()
        };
        let probe = Probe(render);
        let (shapes, traits) = probe.run(source);
        let roles = probe.roles(shapes);
        (compiled.roles, compiled.shapes, compiled.traits) = (roles, shapes, traits);
        Ok(compiled)
    }

    /// Without the shapes and the traits of the template.
    pub(super) fn untried(
        source: &str,
        special_tokens: Map<String, serde_json::Value>,
        clock: fn() -> jiff::Zoned,
    ) -> Result<Self, TemplateError> {
        let program = Program::new(source::adapted(source), environment(clock))?;
        let writes_content = source.contains("content");
        let (roles, shapes) = (SupportedRoles::default(), SupportedShapes::default());
        Ok(Self { program, special_tokens, writes_content, roles, shapes, traits: TemplateTraits::default() })
    }

    pub(in crate::text) fn traits(&self) -> &TemplateTraits {
        &self.traits
    }

    /// Renders messages of OpenAI's clients, converted to the roles and shapes that the template supports.
    pub(super) fn render_adapted(&self, mut inputs: ChatInputs) -> Result<String, TemplateError> {
        let image_text = inputs.image_text.as_deref();
        let convert = |message| self.shapes.convert(message, image_text);
        inputs.messages = self.roles.convert(inputs.messages).into_iter().map(convert).collect();
        self.shapes.tools.convert(&mut inputs);
        self.check_written(&inputs)?;
        self.render(inputs)
    }

    /// Refuses a message that the template would drop because of its role.
    fn check_written(&self, inputs: &ChatInputs) -> Result<(), TemplateError> {
        if !inputs.messages.iter().any(|message| self.roles.is_doubtful(message)) {
            return Ok(());
        }
        let mut messages = inputs.messages.clone();
        let marked = self.roles.mark_doubtful(&mut messages);
        if marked.is_empty() {
            return Ok(());
        }
        let ends = ChatInputs { add_generation_prompt: Some(false), continue_final_message: None, ..inputs.clone() };
        let trial = ChatInputs { messages, ..ends };
        // A template that refuses the trial refuses the conversation.
        let Ok(text) = self.render(trial) else { return Ok(()) };
        match marked.into_iter().find(|(_, mark)| !text.contains(mark)) {
            Some((role, _)) => {
                let known = Probe(|inputs| self.render(inputs).ok()).written_roles(self.shapes);
                Err(TemplateError::Role(format!("{role:?}; it writes {}", known.join(", "))))
            }
            None => Ok(()),
        }
    }

    /// Renders messages unconverted, exactly as transformers renders these inputs.
    pub(in crate::text) fn render(&self, mut inputs: ChatInputs) -> Result<String, TemplateError> {
        if let Some(name) = RESERVED.into_iter().find(|name| inputs.kwargs.contains_key(*name)) {
            return Err(TemplateError::ReservedKwarg(name.to_owned()));
        }
        if inputs.documents.as_ref().is_some_and(|documents| !is_list_of_objects(documents)) {
            return Err(TemplateError::Documents);
        }
        inputs.messages = inputs.messages.into_iter().map(normalized).collect();
        let end = PromptEnd::of(&inputs)?;
        match end {
            PromptEnd::AfterMessages { .. } => self.write(&inputs, end),
            PromptEnd::InLastMessageByDefault => {
                continuation::cut_after_last(self.write(&inputs, end)?, &inputs.messages)
            }
            PromptEnd::InLastMessage if !self.writes_content => Err(TemplateError::NotContinuable),
            PromptEnd::InLastMessage => {
                let text = continuation::mark(&mut inputs.messages)?;
                continuation::cut_at_mark(self.write(&inputs, end)?, &text)
            }
        }
    }

    fn write(&self, inputs: &ChatInputs, end: PromptEnd) -> Result<String, TemplateError> {
        let mut context = self.special_tokens.clone();
        context.extend(inputs.kwargs.clone());
        context.insert("messages".to_owned(), inputs.messages.clone().into());
        context.insert("tools".to_owned(), inputs.tools.clone().into());
        context.insert("documents".to_owned(), inputs.documents.clone().unwrap_or_default());
        context.insert("add_generation_prompt".to_owned(), end.adds_generation_prompt().into());
        // A panic must not end the process that renders for all requests.
        let rendered = catch_unwind(AssertUnwindSafe(|| self.program.render(Value::from_serialize(context))));
        rendered.map_err(|_| TemplateError::Invalid("the template engine panicked".to_owned()))?.map_err(Into::into)
    }
}

/// A template's instructions, with the environment that runs them.
struct Program {
    environment: &'static Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Program {
    /// A process compiles one template, so its source and its environment live as long as the process.
    fn new(source: String, environment: Environment<'static>) -> Result<Self, TemplateError> {
        let source: &'static str = source.leak();
        let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        let tree = syntax::rewritten(source, &machinery::parse(source, NAME, SyntaxConfig, whitespace)?)?;
        let mut generator = CodeGenerator::new(NAME, source);
        generator.compile_stmt(&tree);
        let (instructions, blocks) = generator.finish();
        Ok(Self { environment: Box::leak(Box::new(environment)), instructions, blocks })
    }

    fn render(&self, context: Value) -> Result<String, Error> {
        let mut text = String::new();
        let mut out = machinery::make_string_output(&mut text);
        Vm::new(self.environment).eval(&self.instructions, context, &self.blocks, &mut out, AutoEscape::None)?;
        Ok(text)
    }
}

fn is_list_of_objects(documents: &serde_json::Value) -> bool {
    documents.as_array().is_some_and(|documents| documents.iter().all(serde_json::Value::is_object))
}

/// The message as transformers passes it to templates: without null fields, and with its reasoning under both names
/// that templates read.
fn normalized(message: serde_json::Value) -> serde_json::Value {
    let serde_json::Value::Object(fields) = message else { return message };
    let mut fields: Map<_, _> = fields.into_iter().filter(|(_, value)| !value.is_null()).collect();
    let reasoning =
        ["reasoning_content", "thinking", "reasoning"].into_iter().find_map(|name| fields.get(name)).cloned();
    if let Some(reasoning) = reasoning {
        // The order of fields is transformers': a template may write a whole message.
        if !fields.contains_key("thinking") {
            fields.shift_insert(0, "thinking".to_owned(), reasoning.clone());
        }
        fields.insert("reasoning_content".to_owned(), reasoning);
    }
    fields.into()
}

fn environment(clock: fn() -> jiff::Zoned) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MAX_OPERATIONS));
    environment.set_unknown_method_callback(method::call);
    environment.set_formatter(format_as_python);
    operator::add_to(&mut environment);
    filter::add_to(&mut environment);
    sequence_filter::add_to(&mut environment);
    text_filter::add_to(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("range", operator::range);
    environment.add_function("strftime_now", move |format: &str| strftime(format, &clock()));
    environment
}

fn format_as_python(out: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    out.write_str(&python_str::str(value)?).map_err(Error::from)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(invalid(python_str::str(message)?))
}

fn strftime(format: &str, now: &jiff::Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}
