//! URLs of files: http or https, with a host and without credentials.

use axum::http::Uri;

/// Characters of a name in the DNS.
const MAX_HOST_CHARACTERS: usize = 253;

/// A URL that can be fetched, if the address of its host allows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    is_tls: bool,
    /// In lower case, without brackets or a last dot.
    host: String,
    port: u16,
    /// Host and port as given.
    authority: String,
    /// Path and query.
    target: String,
}

impl Url {
    /// Fails with the reason.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let uri: Uri = text.parse().map_err(|_| "it is not a URL")?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err("its scheme must be http or https"),
        };
        let authority = uri.authority().ok_or("it has no host")?;
        if authority.as_str().contains('@') {
            return Err("a URL with a user name or a password is not allowed");
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        if host.is_empty() {
            return Err("it has no host");
        }
        if host.len() > MAX_HOST_CHARACTERS {
            return Err("its host is longer than any name can be");
        }
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            None if authority.as_str().ends_with(authority.host()) => {
                if is_tls {
                    443
                } else {
                    80
                }
            }
            None => return Err("its port is not a number up to 65535"),
        };
        let target = uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        // The part before a query can be empty.
        let target = if target.starts_with('/') { target } else { format!("/{target}") };
        Ok(Self { is_tls, host: host.to_ascii_lowercase(), port, authority: authority.as_str().to_owned(), target })
    }

    /// The target of a redirect from this URL (RFC 3986, section 5.2; the server normalizes paths).
    pub(super) fn join(&self, location: &str) -> Result<Self, &'static str> {
        let scheme = if self.is_tls { "https" } else { "http" };
        let path = self.target.split('?').next().unwrap_or_default();
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_absolute = location.split(['/', '?', '#']).next().is_some_and(|segment| segment.contains(':'));
        Self::parse(&match location.as_bytes() {
            _ if is_absolute => location.to_owned(),
            [b'/', b'/', ..] => format!("{scheme}:{location}"),
            [b'/', ..] => format!("{scheme}://{}{location}", self.authority),
            [] | [b'#', ..] => format!("{scheme}://{}{}", self.authority, self.target),
            [b'?', ..] => format!("{scheme}://{}{path}{location}", self.authority),
            _ => format!("{scheme}://{}{folder}/{location}", self.authority),
        })
    }

    pub(super) fn is_tls(&self) -> bool {
        self.is_tls
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    pub(super) fn target(&self) -> &str {
        &self.target
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        for (text, is_tls, host, port, target) in [
            ("http://example.org", false, "example.org", 80, "/"),
            ("HTTPS://Example.ORG./a%20b?c=d#e", true, "example.org", 443, "/a%20b?c=d"),
            ("http://10.0.0.1:8080/x", false, "10.0.0.1", 8080, "/x"),
            ("https://[2001:db8::1]:8443/", true, "2001:db8::1", 8443, "/"),
            ("http://a?b", false, "a", 80, "/?b"),
        ] {
            let url = Url::parse(text).unwrap();
            let found = (url.is_tls(), url.host(), url.port(), url.target());
            assert_eq!(found, (is_tls, host, port, target), "{text}");
        }
    }

    #[test]
    fn what_is_no_url_of_a_file_is_refused() {
        let long_host = format!("http://{}/", "a".repeat(254));
        for (text, reason) in [
            ("", "not a URL"),
            ("example.org/a.png", "not a URL"),
            ("/a.png", "scheme"),
            ("ftp://example.org/a", "scheme"),
            ("file:///etc/passwd", ""),
            ("http://", ""),
            ("http://:80/", ""),
            ("http:///a", ""),
            ("http://user@example.org/", "user name"),
            ("http://user:password@example.org/", "user name"),
            ("http://example.org@10.0.0.1/", "user name"),
            ("http://a:99999/", ""),
            ("http://a b/", "not a URL"),
            (long_host.as_str(), "longer than any name"),
            ("http://a/\r\nx: y", "not a URL"),
        ] {
            let refusal = Url::parse(text).expect_err(text);
            assert!(refusal.contains(reason), "{text}: {refusal}");
        }
    }

    #[test]
    fn a_redirect_is_relative_to_its_url() {
        let url = Url::parse("https://a.org:8443/b/c?d").unwrap();
        for (location, target) in [
            ("http://x.org/y", "http://x.org/y"),
            ("//x.org/y", "https://x.org/y"),
            ("/y?z", "https://a.org:8443/y?z"),
            ("y", "https://a.org:8443/b/y"),
            ("?y", "https://a.org:8443/b/c?y"),
            ("", "https://a.org:8443/b/c?d"),
            ("y:z/../w", ""),
            ("/y:z", "https://a.org:8443/y:z"),
        ] {
            assert_eq!(url.join(location).ok(), Url::parse(target).ok(), "{location}");
        }
        assert!(url.join("data:image/png;base64,AAAA").is_err() && url.join("file:///etc/passwd").is_err());
    }
}
