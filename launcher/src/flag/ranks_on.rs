//! Values of `--ranks-on`: `node://HOST:PORT` of an agent, or `ray://HOST:PORT` of a Ray cluster, which chooses the machines.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

/// Host and port of an agent, as other machines reach them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeAddress {
    /// A name or an IP address; of IPv6 in brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// A value of `--ranks-on`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RanksOn {
    Node(NodeAddress),
    /// HOST:PORT of the cluster's control service (GCS).
    Ray(String),
}

impl RanksOn {
    pub(crate) fn node(&self) -> Option<NodeAddress> {
        match self {
            Self::Node(address) => Some(address.clone()),
            Self::Ray(_) => None,
        }
    }
}

impl FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, "node://")
            .ok_or_else(|| format!("{text:?} must be node://HOST:PORT, the address of a `penstock node`"))
    }
}

impl FromStr for RanksOn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match parse(text, "ray://") {
            Some(NodeAddress { host, port }) => Ok(Self::Ray(format!("{host}:{port}"))),
            None => {
                text.parse().map(Self::Node).map_err(|refusal| refusal + ", or ray://HOST:PORT, that of a Ray cluster")
            }
        }
    }
}

fn parse(text: &str, scheme: &str) -> Option<NodeAddress> {
    let (host, port) = text.strip_prefix(scheme)?.rsplit_once(':')?;
    let is_v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).is_some_and(|host| host.contains(':'));
    let is_name = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
    let port = port.parse().ok().filter(|port| *port > 0)?;
    (is_v6 || is_name).then(|| NodeAddress { host: host.to_owned(), port })
}

impl Display for NodeAddress {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "node://{}:{}", self.host, self.port)
    }
}

impl Display for RanksOn {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(formatter),
            Self::Ray(cluster) => write!(formatter, "ray://{cluster}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["node://10.0.0.1:7", "node://gpu-1.local:7000", "node://[fe80::1]:1", "ray://head:6379"] {
            assert_eq!(text.parse::<RanksOn>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "a:1",
            "node://a",
            "node://:1",
            "node://a:0",
            "node://a:1/b",
            "node://a@b:1",
            "http://a:1",
            "ray://auto",
        ] {
            assert!(text.parse::<RanksOn>().unwrap_err().contains("must be node://HOST:PORT"), "{text}");
        }
        assert!("ray://head:6379".parse::<NodeAddress>().is_err());
    }
}
