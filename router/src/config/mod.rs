//! The router's configuration, resolved once by the launcher. An `Option` here means that the setting can be absent.

mod allowed_host;
mod sampling_default;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use subtle::{Choice, ConstantTimeEq};

pub(crate) use allowed_host::network_contains;
pub use allowed_host::{AllowedHost, AllowedHostError};
pub use sampling_default::{BadDefault, SamplingDefaults};

use crate::limits::{ConnectionLimits, QueueLimits, RequestLimits};
use crate::sequence::{ImageInput, Pooling};

/// Everything that the router is configured with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The model id as given by the user, or the embedded model's name; reported by `/info` and `/v1/models`.
    pub model_id: String,
    /// Names that requests may call the model by, at least one. Answers name the first, `/v1/models` lists all.
    pub served_model_names: Vec<String>,
    /// Whether a request that names another model is refused. Otherwise any name is accepted.
    pub check_model_names: bool,
    /// LoRA adapters that requests may name.
    pub adapters: AdapterConfig,
    /// Whether requests may bring a chat template.
    pub trusts_request_chat_templates: bool,
    /// Whether requests with fields that the server does not know are refused. Otherwise the answer has a warning.
    pub strict_requests: bool,
    /// The priorities that are served first.
    pub priority_order: PriorityOrder,
    /// Hub commit, if known.
    pub model_sha: Option<String>,
    /// Hub pipeline tag, if known; decides the default of `return_full_text` on `POST /`.
    pub pipeline_tag: Option<String>,
    /// Prepared model folder: tokenizer.json, tokenizer_config.json, generation_config.json, chat template.
    pub model_folder: PathBuf,
    /// Parameters for requests on the routes of OpenAI and Anthropic that leave them out.
    pub sampling_defaults: SamplingDefaults,
    /// Limits that every request is checked against.
    pub limits: RequestLimits,
    /// First tokens of an encoder–decoder's decoder, which the answer continues. Empty for a decoder-only model,
    /// whose answer continues its input.
    pub decoder_prefix: Arc<[u32]>,
    /// What the model makes of a sequence; `None`: it generates text.
    pub pooling: Option<Pooling>,
    /// Limits of the queue.
    pub queue: QueueLimits,
    /// Number of tokenizer threads.
    pub validation_workers: usize,
    /// Maximum size of a request body, in bytes.
    pub payload_limit_bytes: usize,
    /// Origins allowed by CORS. Empty: any origin.
    pub cors_allow_origins: Vec<String>,
    /// Keys of the protected routes. Without keys every route is open.
    pub api_keys: ApiKeys,
    /// Value of the `x-compute-type` header.
    pub compute_type: String,
    /// Whether requests may constrain their answer with a grammar.
    pub grammar_support: bool,
    /// The most tokens of a chat's thoughts where the request says nothing; `None`: any number.
    pub reasoning_budget: Option<u32>,
    /// Whether requests may ask for logprobs of their prompt.
    pub prefill_logprobs: bool,
    /// Responses of `/v1/responses` that later requests can continue; 0: none.
    pub max_stored_responses: usize,
    /// Whether `/playground` is served, and `/` to browsers.
    pub playground: bool,
    /// Paths on which Vertex AI sends its requests.
    pub vertex_routes: VertexRoutes,
    /// Limits of connections.
    pub connections: ConnectionLimits,
    /// How long running requests may take to finish after SIGTERM.
    pub graceful_termination_timeout: Duration,
    /// Destination of traces; `None`: requests are not traced.
    pub traces: Option<TraceConfig>,
    /// How prompts have images; `None`: the model reads none.
    pub image_input: Option<ImageInput>,
    /// Limits of fetching images from URLs; `None`: URLs are refused.
    pub image_urls: Option<ImageUrlConfig>,
}

/// LoRA adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterConfig {
    /// Served from the start, each loaded by its first request. Names are unique.
    pub sources: Vec<AdapterSource>,
    /// Loaded at a time; 0: none.
    pub max_loaded: usize,
    /// Whether requests may add adapters and remove them.
    pub can_change: bool,
}

/// An adapter's name, and its folder as an absolute path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// What requests call it.
    pub name: String,
    /// In PEFT's layout.
    pub path: PathBuf,
}

/// Limits of fetching images from URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUrlConfig {
    /// Hosts that may have addresses which are not public.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Bytes of the images that one prompt names by URL, together.
    pub max_bytes: usize,
}

/// Destination of traces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    /// A collector that takes OTLP over gRPC.
    pub endpoint: Uri,
    /// `service.name` of the server's spans.
    pub service_name: String,
}

impl TraceConfig {
    /// Checks the URL of the collector.
    pub fn new(endpoint: &str, service_name: &str) -> Result<Self, EndpointError> {
        let uri = endpoint.parse::<Uri>().ok().filter(|uri| {
            let has_plain_host =
                uri.authority().is_some_and(|host| !host.host().is_empty() && !host.as_str().contains('@'));
            uri.scheme_str() == Some("http") && has_plain_host && uri.path() == "/" && uri.query().is_none()
        });
        let endpoint = uri.ok_or_else(|| EndpointError(endpoint.to_owned()))?;
        Ok(Self { endpoint, service_name: service_name.to_owned() })
    }
}

/// The URL of a collector cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--otlp-endpoint is {0:?}, must be http://HOST:PORT, as in http://localhost:4317: OTLP over gRPC without TLS; \
     for TLS or HTTP, send to a collector on this machine that passes the traces on"
)]
pub struct EndpointError(String);

/// The priorities that are served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorityOrder {
    /// Higher numbers.
    HighestFirst,
    /// Lower numbers, as in vLLM.
    LowestFirst,
}

impl Config {
    /// Whether a request that names an unknown model is refused. Always where adapters come and go: the base must not answer for one that
    /// is gone.
    pub(crate) fn checks_model_names(&self) -> bool {
        self.check_model_names || self.adapters.can_change
    }

    /// The model's name in answers.
    pub(crate) fn model_name(&self) -> &str {
        self.served_model_names.first().unwrap_or(&self.model_id)
    }
}

/// The paths that Vertex AI chooses for a container; they are served as `/vertex` and `/health`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VertexRoutes {
    /// Served as `POST /vertex`.
    pub predict: Option<String>,
    /// Served as `GET /health`.
    pub health: Option<String>,
}

/// The API keys that open the protected routes. `Debug` does not print them.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Arc<[String]>,
}

impl ApiKeys {
    /// Any of `keys` opens the routes; with none, all routes are open.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        Self { keys: keys.into_iter().collect() }
    }

    /// Whether all routes are open.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether `given` is one of the keys. Compares in constant time.
    pub(crate) fn contains(&self, given: &[u8]) -> bool {
        let found = self.keys.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given));
        found.into()
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ApiKeys({} hidden)", self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_http_url_is_a_collector() {
        for endpoint in
            ["http://localhost:4317", "http://10.0.0.7:4317/", "http://[::1]:4317", "http://collector.monitoring"]
        {
            assert!(TraceConfig::new(endpoint, "name").is_ok(), "{endpoint}");
        }
        for endpoint in [
            "",
            "localhost:4317",
            "collector",
            "https://localhost:4317",
            "grpc://localhost:4317",
            "http://",
            "http://user:password@localhost:4317",
            "http://localhost:4318/v1/traces",
            "http://localhost:4317?key=1",
        ] {
            let error = TraceConfig::new(endpoint, "name").unwrap_err().to_string();
            assert!(error.contains(&format!("{endpoint:?}")) && error.contains("http://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", ApiKeys::new(["first".to_owned()])), "ApiKeys(1 hidden)");
    }
}
