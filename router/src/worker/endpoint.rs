//! The address on which a worker listens.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig};

use super::error::root_cause;
use crate::tls::Identity;

/// The name in every worker's certificate. Peers check it instead of host names, because each group has an authority of its own.
pub const WORKER_NAME: &str = "worker.penstock";

/// How often a worker on another machine must answer.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// How long its answer may take, so that a machine that vanished counts as lost within 20 s, as for `penstock node`.
const PING_TIMEOUT: Duration = Duration::from_secs(15);

/// An address of a worker. It prints as a URI: `unix:/path` or `https://host:port`.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A socket in a folder that only this user can open.
    Unix(PathBuf),
    /// An address that other machines may reach, with mutual TLS.
    Tcp {
        /// Host name or IP address; of IPv6 in brackets.
        host: String,
        /// Never 0.
        port: u16,
        /// What both sides authenticate each other with.
        tls: Arc<WorkerTls>,
    },
}

/// The router's side of the mutual TLS with the workers of a group. `Debug` prints no key.
pub struct WorkerTls {
    /// The router's certificate.
    pub identity: Identity,
    /// PEM of the authority that signed the workers' certificates.
    pub authority: String,
}

impl fmt::Debug for WorkerTls {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("WorkerTls(hidden)")
    }
}

impl Display for Endpoint {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp { host, port, .. } => write!(formatter, "https://{host}:{port}"),
        }
    }
}

impl Endpoint {
    /// Opens a connection. The error says why there is none.
    pub(super) async fn connect(&self) -> Result<Channel, String> {
        let connected = match self {
            Self::Unix(path) => {
                let connector = tower::service_fn({
                    let path = path.clone();
                    move |_| {
                        let path = path.clone();
                        async move { UnixStream::connect(path).await.map(TokioIo::new) }
                    }
                });
                // The address is never used: the connector connects to the socket.
                tonic::transport::Endpoint::from_static("http://worker").connect_with_connector(connector).await
            }
            Self::Tcp { tls, .. } => {
                let config = ClientTlsConfig::new()
                    .domain_name(WORKER_NAME)
                    .ca_certificate(Certificate::from_pem(&tls.authority))
                    .identity(tls.identity.to_tonic());
                let endpoint = tonic::transport::Endpoint::from_shared(self.to_string())
                    .and_then(|endpoint| endpoint.tls_config(config))
                    .map(|endpoint| {
                        endpoint
                            .tcp_nodelay(true)
                            .tcp_keepalive(Some(PING_INTERVAL))
                            .tcp_keepalive_interval(Some(PING_INTERVAL))
                            .http2_keep_alive_interval(PING_INTERVAL)
                            .keep_alive_timeout(PING_TIMEOUT)
                            .keep_alive_while_idle(true)
                    });
                match endpoint {
                    Ok(endpoint) => endpoint.connect().await,
                    Err(error) => Err(error),
                }
            }
        };
        connected.map_err(|error| root_cause(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_prints_as_a_uri_without_its_key() {
        let identity = Identity { certificates: "C".to_owned(), key: "K".to_owned() };
        let tls = Arc::new(WorkerTls { identity, authority: "A".to_owned() });
        let tcp = Endpoint::Tcp { host: "[::1]".to_owned(), port: 5, tls };
        assert_eq!(tcp.to_string(), "https://[::1]:5");
        assert_eq!(Endpoint::Unix("/a/b".into()).to_string(), "unix:/a/b");
        assert!(format!("{tcp:?}").contains("WorkerTls(hidden)"));
    }
}
