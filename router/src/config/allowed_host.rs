//! Hosts that the operator allows although their addresses are not public.

use std::net::IpAddr;
use std::str::FromStr;

/// A host, or several, of `--allowed-image-hosts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedHost {
    /// The host with this name, in lower case.
    Name(String),
    /// All hosts whose names end with this, in lower case; it begins with a dot.
    Suffix(String),
    /// All hosts that have an address in this network.
    Network {
        /// An address of the network.
        address: IpAddr,
        /// Leading bits that all its addresses have in common.
        length: u8,
    },
}

/// A host cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} must be a name, as in images.internal, names with one ending, as in *.internal, or a network, as in 10.1.0.0/16"
)]
pub struct AllowedHostError(String);

impl AllowedHost {
    /// Whether a host with this name, in lower case, may have this address.
    pub(crate) fn allows(&self, host: &str, address: IpAddr) -> bool {
        match self {
            Self::Name(name) => host == name,
            Self::Suffix(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
            Self::Network { address: network, length } => network_contains(*network, *length, address.to_canonical()),
        }
    }
}

impl FromStr for AllowedHost {
    type Err = AllowedHostError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || AllowedHostError(text.to_owned());
        let (host, length) = text.split_once('/').map_or((text, None), |(host, length)| (host, Some(length)));
        if let Ok(address) = host.parse::<IpAddr>() {
            let width = if address.is_ipv4() { 32 } else { 128 };
            let length = length.map_or(Ok(width), str::parse).map_err(|_| fail())?;
            return if length <= width { Ok(Self::Network { address, length }) } else { Err(fail()) };
        }
        let (name, is_suffix) = host.strip_prefix("*.").map_or((host, false), |name| (name, true));
        let is_label = |label: &str| {
            !label.is_empty() && label.chars().all(|char| char.is_ascii_alphanumeric() || char == '-' || char == '_')
        };
        if length.is_some() || !name.split('.').all(is_label) {
            return Err(fail());
        }
        let name = name.to_ascii_lowercase();
        Ok(if is_suffix { Self::Suffix(format!(".{name}")) } else { Self::Name(name) })
    }
}

/// Whether the network has the address. Those of IPv4 and IPv6 have none in common.
pub(crate) fn network_contains(network: IpAddr, length: u8, address: IpAddr) -> bool {
    let (network, address, width) = match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => (u32::from(network).into(), u32::from(address).into(), 32),
        (IpAddr::V6(network), IpAddr::V6(address)) => (u128::from(network), u128::from(address), 128),
        _ => return false,
    };
    // Shifting by the width would overflow: a network of length 0 has every address.
    length == 0 || (network ^ address) >> (width - u32::from(length)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(allowed: &str, host: &str, address: &str) -> bool {
        allowed.parse::<AllowedHost>().unwrap().allows(host, address.parse().unwrap())
    }

    #[test]
    fn names_endings_and_networks_allow_their_hosts_only() {
        assert!(allows("Images.Internal", "images.internal", "10.0.0.1"));
        assert!(!allows("images.internal", "my.images.internal", "10.0.0.1"));
        assert!(allows("*.internal", "images.internal", "10.0.0.1"));
        assert!(!allows("*.internal", "internal", "10.0.0.1") && !allows("*.internal", "evilinternal", "10.0.0.1"));
        assert!(allows("10.1.0.0/16", "any", "10.1.2.3") && !allows("10.1.0.0/16", "any", "10.2.0.1"));
        assert!(allows("127.0.0.1", "any", "127.0.0.1") && !allows("127.0.0.1", "127.0.0.1", "127.0.0.2"));
        assert!(allows("127.0.0.0/8", "any", "::ffff:127.0.0.1"));
        assert!(allows("fd00::/8", "any", "fd12::1") && allows("::1", "any", "::1"));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for text in
            ["", "*", "*.", "a..b", "a b", "http://a", "a:80", "10.0.0.0/33", "::/129", "10.0.0.0/", "a/8", "*.*.a"]
        {
            let message = text.parse::<AllowedHost>().unwrap_err().to_string();
            assert!(message.starts_with(&format!("{text:?} must be a name")), "{message}");
        }
    }

    #[test]
    fn a_network_has_the_addresses_with_its_prefix() {
        let has = |network: &str, length, address: &str| {
            network_contains(network.parse().unwrap(), length, address.parse().unwrap())
        };
        assert!(has("10.1.0.0", 16, "10.1.255.255") && !has("10.1.0.0", 16, "10.2.0.0"));
        assert!(has("10.1.2.3", 32, "10.1.2.3") && !has("10.1.2.3", 32, "10.1.2.2"));
        assert!(has("0.0.0.0", 0, "255.1.1.1") && !has("0.0.0.0", 0, "::1"));
        assert!(has("fd00::", 8, "fdff::1") && has("::1", 128, "::1") && has("::", 0, "ffff::"));
    }
}
