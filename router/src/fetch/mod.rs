//! Fetches files that requests name by URL: from public addresses, and from hosts that the operator allows.
//! docs/adr/images.md has the decision.
//!
//! INVARIANT: a connection goes only to an address that was checked after its name was resolved, and no name is resolved a second time
//! for the same connection. This holds for the first URL and for each redirect.

mod address;
mod network;
#[cfg(test)]
mod tests;
mod url;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use network::{Network, SystemNetwork};
pub(crate) use url::Url;

use crate::config::ImageUrlConfig;
use crate::telemetry::metrics::{self, ImageFetch};

/// Files that are fetched at the same time, for all requests.
const MAX_CONCURRENT: usize = 32;
const MAX_REDIRECTS: usize = 3;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For one file, with redirects.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(20);
/// The head of a response.
const MAX_HEAD_BYTES: usize = 16 << 10;
const USER_AGENT: &str = concat!("penstock/", env!("CARGO_PKG_VERSION"));

/// Fetches files within limits.
pub(crate) struct Fetcher {
    config: ImageUrlConfig,
    network: Box<dyn Network>,
    /// Reads the certificates of the system at the first HTTPS URL.
    tls: OnceLock<TlsConnector>,
    permits: Semaphore,
}

/// The bytes that are left to the files of one prompt.
#[derive(Debug)]
pub(crate) struct ByteBudget {
    max: usize,
    left: AtomicUsize,
}

/// Why a file cannot be had. The messages are for clients: they tell nothing of the network but a host and a status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    /// It has no address at all, or only other ones. Messages do not tell which, because that would reveal private names.
    #[error("{host} has no public address; the server's --allowed-image-hosts can allow private ones")]
    NotPublic { host: String },
    #[error("{host} cannot be reached")]
    Unreachable { host: String },
    #[error("{host} sent a response that is not valid HTTP, or whose headers have more than {MAX_HEAD_BYTES} bytes")]
    Malformed { host: String },
    #[error("{host} answered with status {status}")]
    Status { host: String, status: u16 },
    #[error("{host} redirects to what is not an http or https URL")]
    Redirect { host: String },
    #[error("{host} redirects again after {MAX_REDIRECTS} redirects")]
    Redirects { host: String },
    #[error("the images that the prompt names by URL have more than {max} bytes, which --max-image-fetch-size allows")]
    TooLarge { max: usize },
    #[error("{host} did not send the image within {} s", TOTAL_TIMEOUT.as_secs())]
    Late { host: String },
}

/// What TLS and TCP connections have in common.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Fetcher {
    pub(crate) fn new(config: ImageUrlConfig) -> Self {
        Self::over(Box::new(SystemNetwork), config)
    }

    fn over(network: Box<dyn Network>, config: ImageUrlConfig) -> Self {
        Self { config, network, tls: OnceLock::new(), permits: Semaphore::new(MAX_CONCURRENT) }
    }

    /// The budget of one prompt.
    pub(crate) fn budget(&self) -> ByteBudget {
        ByteBudget { max: self.config.max_bytes, left: AtomicUsize::new(self.config.max_bytes) }
    }

    /// The file. Dropping the future closes the connection.
    pub(crate) async fn fetch(&self, url: &Url, budget: &ByteBudget) -> Result<Vec<u8>, FetchError> {
        // An error means that the semaphore was closed, which never happens.
        let _permit = self.permits.acquire().await.ok();
        let late = |_| Err(FetchError::Late { host: url.host().to_owned() });
        let fetched = timeout(TOTAL_TIMEOUT, self.follow(url.clone(), budget)).await.unwrap_or_else(late);
        match &fetched {
            Ok(file) => metrics::image_fetched(ImageFetch::Fetched, file.len()),
            Err(FetchError::NotPublic { .. }) => metrics::image_fetched(ImageFetch::NotPublic, 0),
            Err(_) => metrics::image_fetched(ImageFetch::Failed, 0),
        }
        fetched
    }

    async fn follow(&self, mut url: Url, budget: &ByteBudget) -> Result<Vec<u8>, FetchError> {
        for _ in 0..=MAX_REDIRECTS {
            let host = || url.host().to_owned();
            // The connection lives as long as `driver`.
            let (response, _driver) = self.get(&url).await?;
            match response.status() {
                StatusCode::OK => return read(response.into_body(), budget, host).await,
                StatusCode::MOVED_PERMANENTLY
                | StatusCode::FOUND
                | StatusCode::SEE_OTHER
                | StatusCode::TEMPORARY_REDIRECT
                | StatusCode::PERMANENT_REDIRECT => {
                    let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
                    let next = location.and_then(|location| url.join(location).ok());
                    url = next.ok_or_else(|| FetchError::Redirect { host: host() })?;
                }
                status => return Err(FetchError::Status { host: host(), status: status.as_u16() }),
            }
        }
        Err(FetchError::Redirects { host: url.host().to_owned() })
    }

    /// Sends the request. The response's body can be read until the task is dropped.
    async fn get(&self, url: &Url) -> Result<(Response<Incoming>, AbortOnDropHandle<()>), FetchError> {
        let malformed = |_| FetchError::Malformed { host: url.host().to_owned() };
        let stream = self.connect(url).await?;
        let mut client = http1::Builder::new();
        client.max_buf_size(MAX_HEAD_BYTES);
        let (mut sender, connection) = client.handshake(TokioIo::new(stream)).await.map_err(malformed)?;
        // An error of the connection is also one of the response.
        let driver = AbortOnDropHandle::new(tokio::spawn(async move { drop(connection.await) }));
        let request = Request::get(url.target())
            .header(header::HOST, url.authority())
            .header(header::ACCEPT, "image/*")
            .header(header::USER_AGENT, USER_AGENT)
            .body(Empty::<Bytes>::new())
            .map_err(|_| FetchError::Unreachable { host: url.host().to_owned() })?;
        let response = sender.send_request(request).await.map_err(malformed)?;
        Ok((response, driver))
    }

    async fn connect(&self, url: &Url) -> Result<Box<dyn Stream>, FetchError> {
        let unreachable = || FetchError::Unreachable { host: url.host().to_owned() };
        for address in self.permitted_addresses(url).await? {
            let Ok(Ok(stream)) = timeout(CONNECT_TIMEOUT, self.network.connect(address)).await else { continue };
            if !url.is_tls() {
                return Ok(Box::new(stream));
            }
            let name = ServerName::try_from(url.host().to_owned()).map_err(|_| unreachable())?;
            let connector = self.tls.get_or_init(system_tls);
            let stream = timeout(CONNECT_TIMEOUT, connector.connect(name, stream)).await;
            return stream.ok().and_then(Result::ok).map(|stream| Box::new(stream) as _).ok_or_else(unreachable);
        }
        Err(unreachable())
    }

    /// The addresses that may be connected to; at least one.
    async fn permitted_addresses(&self, url: &Url) -> Result<Vec<SocketAddr>, FetchError> {
        let host = || url.host().to_owned();
        let resolved = timeout(CONNECT_TIMEOUT, self.network.resolve(url.host(), url.port())).await;
        let mut addresses = resolved.ok().and_then(Result::ok).unwrap_or_default();
        let allowed = &self.config.allowed_hosts;
        addresses.retain(|address| {
            let ip = address.ip();
            address::is_public(ip) || allowed.iter().any(|allowed| allowed.allows(url.host(), ip))
        });
        if addresses.is_empty() { Err(FetchError::NotPublic { host: host() }) } else { Ok(addresses) }
    }
}

async fn read(mut body: Incoming, budget: &ByteBudget, host: impl Fn() -> String) -> Result<Vec<u8>, FetchError> {
    let mut file = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| FetchError::Malformed { host: host() })?;
        if let Ok(data) = frame.into_data() {
            budget.take(data.len())?;
            file.extend_from_slice(&data);
        }
    }
    Ok(file)
}

impl ByteBudget {
    fn take(&self, num_bytes: usize) -> Result<(), FetchError> {
        let take = |left: usize| left.checked_sub(num_bytes);
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map(drop).map_err(|_| FetchError::TooLarge { max: self.max })
    }
}

/// TLS that trusts the certificates of the system, or of `SSL_CERT_FILE`.
fn system_tls() -> TlsConnector {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (num_trusted, _) = roots.add_parsable_certificates(found.certs);
    if num_trusted == 0 {
        tracing::warn!("this system has no certificates of authorities, so no https URL can be fetched");
    }
    tls(roots)
}

fn tls(roots: RootCertStore) -> TlsConnector {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("invariant: ring has the cipher suites of the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}
