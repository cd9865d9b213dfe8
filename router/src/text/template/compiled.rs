//! A compiled template, with the environment and the variables that transformers gives it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use serde_json::Map;

use super::continuation::PromptEnd;
use super::error::TemplateError;
use super::input::ChatInputs;
use super::limit::MAX_OPERATIONS;
use super::shape::SupportedShapes;
use super::trial::{TemplateTraits, Trial};
use super::{continuation, filter, method, python_str, source, text_filter};

const NAME: &str = "chat_template";

/// Longest `range` of jinja's sandbox.
const MAX_RANGE: i64 = 100_000;

/// Variables set from the request's own fields; `chat_template_kwargs` must not contradict them.
const RESERVED: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"];

pub(in crate::text) struct Compiled {
    environment: Environment<'static>,
    special_tokens: Map<String, serde_json::Value>,
    writes_content: bool,
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
        let mut environment = environment(clock);
        environment.add_template_owned(NAME, source::adapted(source))?;
        let writes_content = source.contains("content");
        let shapes = SupportedShapes::default();
        let traits = TemplateTraits::default();
        let mut compiled = Self { environment, special_tokens, writes_content, shapes, traits };
        // One endless rendering is enough to know the template.
        let is_endless = Cell::new(false);
        let render = |inputs| {
            let rendered = (!is_endless.get()).then(|| compiled.render(inputs))?;
            is_endless.set(matches!(rendered, Err(TemplateError::TooExpensive)));
            rendered.ok()
        };
        (compiled.shapes, compiled.traits) = Trial(render).run(source);
        Ok(compiled)
    }

    pub(in crate::text) fn traits(&self) -> &TemplateTraits {
        &self.traits
    }

    /// Renders messages of OpenAI's clients, converted to the shapes that the template supports.
    pub(super) fn render_adapted(&self, mut inputs: ChatInputs) -> Result<String, TemplateError> {
        inputs.messages = inputs.messages.into_iter().map(|message| self.shapes.convert(message)).collect();
        self.render(inputs)
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
        let template = self.environment.get_template(NAME)?;
        // minijinja 2.24 panics where an empty list or string is reversed.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render(context)));
        rendered.map_err(|_| TemplateError::Invalid("the template engine panicked".to_owned()))?.map_err(Into::into)
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
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(method::call);
    environment.set_formatter(format_as_python);
    filter::add_to(&mut environment);
    text_filter::add_to(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("range", range);
    environment.add_function("strftime_now", move |format: &str| strftime(format, &clock()));
    environment
}

fn format_as_python(out: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    out.write_str(&python_str::str(value)).map_err(Error::from)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, python_str::str(message)))
}

fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = second.map_or((0, first), |stop| (first, stop));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "range() arg 3 must not be zero"));
    }
    let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let stride = i64::try_from(step.unsigned_abs()).unwrap_or(i64::MAX);
    let len = distance.max(0).saturating_add(stride - 1) / stride;
    if len > MAX_RANGE {
        let message = format!("range too big: {len} numbers, at most {MAX_RANGE} are allowed");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok((0..len).map(|index| Value::from(start + index * step)).collect())
}

fn strftime(format: &str, now: &jiff::Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}
