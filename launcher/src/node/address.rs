//! Where an agent listens: `node://HOST:PORT`.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

/// Host and port of an agent, as other machines reach them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeAddress {
    /// A name or an IP address; of IPv6 in brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("{text:?} must be node://HOST:PORT, the address of a `penstock node`");
        let (host, port) = text.strip_prefix("node://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(refused)?;
        let is_v6 =
            host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).is_some_and(|host| host.contains(':'));
        let is_name = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(refused)?;
        if is_v6 || is_name { Ok(Self { host: host.to_owned(), port }) } else { Err(refused()) }
    }
}

impl Display for NodeAddress {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "node://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["node://10.0.0.1:7", "node://gpu-1.local:7000", "node://[fe80::1]:1"] {
            assert_eq!(text.parse::<NodeAddress>().unwrap().to_string(), text);
        }
        for text in ["", "a:1", "node://a", "node://:1", "node://a:0", "node://a:1/b", "node://a@b:1", "http://a:1"] {
            assert!(text.parse::<NodeAddress>().unwrap_err().contains("must be node://HOST:PORT"), "{text}");
        }
    }
}
