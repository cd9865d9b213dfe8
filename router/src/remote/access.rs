//! Access control and TLS of engine listeners.
//!
//! INVARIANT: without TLS, the secret crosses only loopback connections, unless the operator allows more by a flag.

use std::net::IpAddr;

use axum::http::Uri;
use tonic::transport::{Certificate, ClientTlsConfig, ServerTlsConfig};

use crate::config::ApiKeys;
use crate::tls::Identity;

/// The secret that both sides share, and the TLS material of this side. `Debug` prints neither.
#[derive(Clone, Default)]
pub struct Access {
    /// Sent by the router, required by the server.
    pub secret: String,
    /// This side's certificate: a server needs one for TLS, a router for mutual TLS.
    pub identity: Option<Identity>,
    /// PEM of the authority that must have signed the other side's certificate. A server with one requires client certificates; a
    /// router without one cannot use `https` URLs.
    pub authority: Option<String>,
    /// Whether the protocol may leave this machine without TLS.
    pub allows_plain_text: bool,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Access(hidden)")
    }
}

/// Why a server's URL cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum UrlError {
    #[error("{0:?} must be http://HOST:PORT or https://HOST:PORT, the address of a server's --engine-listen")]
    Form(String),
    #[error("{0:?} cannot be used: https needs --engine-tls-ca: the authority that signed the server's certificate")]
    NoAuthority(String),
    #[error(
        "{0:?} leaves this machine without TLS: the network could read the secret, prompts and answers; \
         use https, or --engine-without-tls on a network that you trust"
    )]
    PlainText(String),
    #[error("the TLS files cannot be used: {0}")]
    Tls(String),
}

impl Access {
    /// The keys that an engine listener accepts.
    pub(crate) fn keys(&self) -> ApiKeys {
        ApiKeys::new([self.secret.clone()])
    }

    /// `None`: without TLS.
    pub(crate) fn server_tls(&self) -> Option<ServerTlsConfig> {
        let identity = self.identity.as_ref()?;
        let tls = ServerTlsConfig::new().identity(identity.to_tonic());
        Some(match &self.authority {
            Some(authority) => tls.client_ca_root(Certificate::from_pem(authority)),
            None => tls,
        })
    }

    /// Checks a server's URL. The configuration is `None` for `http`.
    pub(super) fn client(&self, url: &str) -> Result<(Uri, Option<ClientTlsConfig>), UrlError> {
        let form = || UrlError::Form(url.to_owned());
        let uri = url.parse::<Uri>().map_err(|_| form())?;
        let has_plain_host = uri.authority().is_some_and(|it| !it.host().is_empty() && !it.as_str().contains('@'));
        if !has_plain_host || uri.port_u16().is_none() || uri.path() != "/" || uri.query().is_some() {
            return Err(form());
        }
        match uri.scheme_str() {
            Some("http") if self.allows_plain_text || uri.host().is_some_and(is_loopback) => Ok((uri, None)),
            Some("http") => Err(UrlError::PlainText(url.to_owned())),
            Some("https") => {
                let authority = self.authority.as_ref().ok_or_else(|| UrlError::NoAuthority(url.to_owned()))?;
                let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
                let tls = match &self.identity {
                    Some(identity) => tls.identity(identity.to_tonic()),
                    None => tls,
                };
                Ok((uri, Some(tls)))
            }
            _ => Err(form()),
        }
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(access: &Access, url: &str) -> UrlError {
        access.client(url).map(|(uri, _)| uri).unwrap_err()
    }

    #[test]
    fn only_an_address_with_a_port_is_a_replica() {
        for url in ["", "host", "host:1", "http://host", "grpc://host:1", "http://a@host:1", "http://host:1/path"] {
            assert_eq!(refusal(&Access::default(), url), UrlError::Form(url.to_owned()));
        }
    }

    #[test]
    fn the_secret_leaves_the_machine_only_with_tls_or_permission() {
        let access = Access::default();
        for url in ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1/"] {
            assert!(access.client(url).unwrap().1.is_none());
        }
        for url in ["http://10.0.0.1:1", "http://127.0.0.1.example.org:1", "http://0.0.0.0:1"] {
            assert_eq!(refusal(&access, url), UrlError::PlainText(url.to_owned()));
        }
        assert!(Access { allows_plain_text: true, ..access.clone() }.client("http://10.0.0.1:1").is_ok());
        assert!(matches!(refusal(&access, "https://10.0.0.1:1"), UrlError::NoAuthority(_)));
        let access = Access { authority: Some("PEM".to_owned()), ..access };
        assert!(access.client("https://10.0.0.1:1").unwrap().1.is_some());
    }

    #[test]
    fn nothing_secret_is_printed() {
        let access = Access { secret: "hunter2".to_owned(), ..Access::default() };
        assert_eq!(format!("{access:?}"), "Access(hidden)");
    }
}
