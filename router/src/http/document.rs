//! The OpenAPI document. Each route is described at its handler; this file adds what all routes have in common.

#![expect(unused_qualifications, reason = "utoipa writes `self::` before names")]

use std::collections::BTreeMap;

use axum::Router;
use axum::http::Method;
use serde_json::Value;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::{AnyOfBuilder, Object, Schema};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, OpenApi, PartialSchema};
use utoipa_swagger_ui::SwaggerUi;

use super::auth;
use super::dialect::Dialect;
use crate::api::error::{AnthropicErrorBody, OpenAiErrorBody, TgiErrorBody};
use crate::config::SamplingDefaults;

const KEY: &str = "key";
const KEY_HEADER: &str = "key_header";

/// The document without its routes.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Penstock",
        description = "A server for large language models: the routes of text-generation-inference, of OpenAI and of Anthropic.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    servers((url = "/", description = "this server")),
    components(schemas(TgiErrorBody, OpenAiErrorBody, AnthropicErrorBody)),
    tags(
        (name = "TGI", description = "The routes of text-generation-inference."),
        (name = "OpenAI", description = "The routes of OpenAI."),
        (name = "TEI", description = "The routes of text-embeddings-inference."),
        (name = "Anthropic", description = "The routes of Anthropic."),
        (name = "Clouds", description = "Routes for SageMaker and Vertex AI."),
        (name = "Server", description = "The served model, health and metrics."),
    )
)]
pub(super) struct Outline;

/// Adds the responses that every route has, and the routes that require a key.
pub(super) fn complete(document: &mut utoipa::openapi::OpenApi) {
    let components = document.components.get_or_insert_default();
    let bearer =
        Http::builder().scheme(HttpAuthScheme::Bearer).description(Some("Required if the server has API keys."));
    components.add_security_scheme(KEY, SecurityScheme::Http(bearer.build()));
    let header = ApiKeyValue::with_description(auth::API_KEY, "Anthropic's header for the same keys.");
    components.add_security_scheme(KEY_HEADER, SecurityScheme::ApiKey(ApiKey::Header(header)));
    let paths = std::mem::take(&mut document.paths.paths);
    document.paths.paths = paths.into_iter().map(|(path, item)| completed(path, item)).collect();
}

/// Fields of requests that have defaults of the model, and what it calls them.
const DEFAULTED: [(&str, &[(&str, &str)]); 5] = [
    (
        "SamplingFields",
        &[
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("min_p", "min_p"),
            ("typical_p", "typical_p"),
            ("repetition_penalty", "repetition_penalty"),
        ],
    ),
    ("ChatRequest", &[("max_tokens", MAX_NEW_TOKENS), ("max_completion_tokens", MAX_NEW_TOKENS)]),
    ("CompletionRequest", &[("max_tokens", MAX_NEW_TOKENS)]),
    ("ResponsesRequest", &[("temperature", "temperature"), ("top_p", "top_p"), ("max_output_tokens", MAX_NEW_TOKENS)]),
    ("AnthropicMessagesRequest", &[("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k")]),
];
const MAX_NEW_TOKENS: &str = "max_new_tokens";

/// Writes the model's defaults in the place of the APIs'.
pub(super) fn set_sampling_defaults(document: &mut utoipa::openapi::OpenApi, defaults: &SamplingDefaults) {
    let values = defaults.values();
    let schemas = &mut document.components.get_or_insert_default().schemas;
    let min_p =
        schemas.get_mut("ExtensionFields").and_then(own).and_then(|fields| fields.properties.get("min_p").cloned());
    if let (Some(min_p), true) = (min_p, values.contains_key("min_p"))
        && let Some(fields) = schemas.get_mut("SamplingFields").and_then(own)
    {
        // The field is that of all routes, but the default is not: the copy overrides the field for these routes.
        fields.properties.insert("min_p".to_owned(), min_p);
    }
    for (name, fields) in DEFAULTED {
        let Some(request) = schemas.get_mut(name).and_then(own) else { continue };
        for (field, key) in fields {
            let property = request.properties.get_mut(*field);
            if let (Some(value), Some(RefOr::T(Schema::Object(property)))) = (values.get(*key), property) {
                let is_larger = |own: &Value| *key == MAX_NEW_TOKENS && own.as_u64() < value.as_u64();
                if !property.default.as_ref().is_some_and(is_larger) {
                    property.default = Some(value.clone());
                }
            }
        }
    }
}

/// A schema's own fields, without those of flattened parts.
fn own(schema: &mut RefOr<Schema>) -> Option<&mut Object> {
    match schema {
        RefOr::T(Schema::Object(object)) => Some(object),
        RefOr::T(Schema::AllOf(all)) => all.items.iter_mut().find_map(own),
        _ => None,
    }
}

fn completed(path: String, mut item: PathItem) -> (String, PathItem) {
    let dialect = Dialect::of(&path);
    let operations = [(Method::GET, &mut item.get), (Method::POST, &mut item.post), (Method::DELETE, &mut item.delete)];
    for (method, operation) in operations {
        let Some(operation) = operation else { continue };
        add(operation, failures(dialect, &ANYWHERE));
        if method == Method::POST {
            add(operation, failures(dialect, &READING));
        }
        if !auth::is_open(&path, &method) {
            add(operation, failures(dialect, &KEYS));
            let either = [KEY, KEY_HEADER].map(|scheme| SecurityRequirement::new(scheme, Vec::<String>::new()));
            operation.security = Some(either.into());
        }
    }
    // A wildcard parameter may contain slashes, which OpenAPI cannot express.
    (path.replace("{*", "{"), item)
}

/// Adds failures that the route does not describe itself.
fn add(operation: &mut Operation, failures: BTreeMap<String, RefOr<Response>>) {
    for (status, failure) in failures {
        operation.responses.responses.entry(status).or_insert(failure);
    }
}

/// Swagger UI, and the document that it shows.
pub(super) fn pages<S: Clone + Send + Sync + 'static>(document: utoipa::openapi::OpenApi) -> Router<S> {
    SwaggerUi::new("/docs").url("/api-doc/openapi.json", document).into()
}

/// Statuses and their descriptions.
type Failures = [(u16, &'static str)];

const ANYWHERE: [(u16, &str); 2] =
    [(431, "The request's head is too large."), (500, "Internal error; the server's log has the details.")];
const KEYS: [(u16, &str); 1] = [(401, "The API key is missing or wrong.")];
const READING: [(u16, &str); 5] = [
    (400, "The body is not JSON; on OpenAI's and Anthropic's routes also: the request is invalid."),
    (408, "The body did not arrive in time."),
    (413, "The body is larger than `--payload-limit`."),
    (415, "The content type is not `application/json`."),
    (422, "As text: the body does not match the schema. As JSON: the request is invalid."),
];
const STORED: [(u16, &str); 2] =
    [(400, "A parameter of the query is not valid."), (404, "The API key has stored no response with this id.")];
const ADMITTING: [(u16, &str); 3] = [
    (404, "The request names a model that is not served; only with `--check-model-name`."),
    (429, "The server is at capacity; `Retry-After` is the number of seconds after which to try again."),
    (503, "The server is shutting down."),
];
/// The first is not one of TGI's routes, whose requests name no model.
const GENERATING: [(u16, &str); 5] = [
    ADMITTING[0],
    (424, "The generation failed."),
    ADMITTING[1],
    ADMITTING[2],
    (504, "The request's own `timeout` expired."),
];

/// The responses of health routes.
pub(super) struct Health;

impl IntoResponses for Health {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let mut answers = failures(Dialect::Tgi, &[(503, "The server cannot generate, or is shutting down.")]);
        answers.insert("200".to_owned(), Response::new("The server is healthy.").into());
        answers
    }
}

/// Failures of routes that take a permit but generate nothing.
pub(super) struct AdmissionFailures;
/// Failures of generations on TGI's routes.
pub(super) struct TgiFailures;
/// Failures of generations on OpenAI's routes.
pub(super) struct OpenAiFailures;
/// Failures of generations on Anthropic's routes.
pub(super) struct AnthropicFailures;
/// Failures of OpenAI's routes that take a permit but generate nothing.
pub(super) struct OpenAiAdmissionFailures;
/// Failures of the route that takes a permit but generates nothing, where the body decides the dialect.
pub(super) struct EitherAdmissionFailures;
/// Failures of Anthropic's route that takes a permit but generates nothing.
pub(super) struct AnthropicAdmissionFailures;
/// Failures of generations where the body decides the dialect.
pub(super) struct EitherFailures;
/// Failures of the routes of stored responses.
pub(super) struct StoredFailures;

impl IntoResponses for AdmissionFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Tgi, &ADMITTING)
    }
}

impl IntoResponses for OpenAiAdmissionFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::OpenAi, &ADMITTING)
    }
}

impl IntoResponses for EitherAdmissionFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Either, &ADMITTING)
    }
}

impl IntoResponses for TgiFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Tgi, &GENERATING[1..])
    }
}

impl IntoResponses for OpenAiFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::OpenAi, &GENERATING)
    }
}

impl IntoResponses for AnthropicFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Anthropic, &GENERATING)
    }
}

impl IntoResponses for AnthropicAdmissionFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Anthropic, &ADMITTING)
    }
}

impl IntoResponses for StoredFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::OpenAi, &STORED)
    }
}

impl IntoResponses for EitherFailures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        failures(Dialect::Either, &GENERATING)
    }
}

fn failures(dialect: Dialect, failures: &Failures) -> BTreeMap<String, RefOr<Response>> {
    let is_possible = |status| match dialect {
        Dialect::OpenAi | Dialect::Anthropic => !matches!(status, 422 | 424),
        Dialect::Tgi | Dialect::Either => true,
    };
    let response = |&(status, description): &(u16, &str)| (status.to_string(), failure(dialect, status, description));
    failures.iter().filter(|(status, _)| is_possible(*status)).map(response).collect()
}

fn failure(dialect: Dialect, status: u16, description: &str) -> RefOr<Response> {
    let (text, bodies): (bool, &[&str]) = match (dialect, status) {
        (_, 431) | (Dialect::Tgi | Dialect::Either, 401) => (false, &[]),
        (Dialect::OpenAi, _) | (Dialect::Either, 404) => (false, &["OpenAiError"]),
        (Dialect::Anthropic, _) => (false, &["AnthropicError"]),
        (Dialect::Tgi, 400 | 415) | (_, 413) => (true, &[]),
        (Dialect::Either, 400 | 415) => (true, &["OpenAiError"]),
        (_, 422) => (true, &["Error"]),
        (Dialect::Either, 429 | 500 | 503 | 504) => (false, &["Error", "OpenAiError"]),
        (Dialect::Tgi | Dialect::Either, _) => (false, &["Error"]),
    };
    let mut response = ResponseBuilder::new().description(description);
    if text {
        response = response.content("text/plain", Content::new(Some(String::schema())));
    }
    if !bodies.is_empty() {
        response = response.content("application/json", Content::new(Some(any_of(bodies))));
    }
    response.into()
}

/// Any of the document's schemas with these names.
pub(super) fn any_of(names: &[&str]) -> RefOr<Schema> {
    match names {
        [name] => Ref::from_schema_name(*name).into(),
        names => names.iter().fold(AnyOfBuilder::new(), |any, name| any.item(Ref::from_schema_name(*name))).into(),
    }
}

#[cfg(test)]
mod tests;
