//! Reads the secret and the TLS files of the engine protocol. Errors never contain a secret.

use std::path::{Path, PathBuf};

use penstock_router::remote::Access;
use penstock_router::tls::Identity;

use crate::flag::args::Args;

/// The variable that has the secret itself.
pub(crate) const SECRET: &str = "ENGINE_SECRET";
/// A shorter secret could be guessed.
const MIN_SECRET_CHARACTERS: usize = 16;

/// Why a router and a server cannot be connected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccessError {
    #[error("cannot read --{flag} {}: {source}", .path.display())]
    Read { flag: &'static str, path: PathBuf, source: std::io::Error },
    #[error("--engine-listen and --replica need a secret: give --engine-secret-file, or the variable {}", SECRET)]
    NoSecret,
    #[error("the engine's secret has {0} characters, must have at least {min}", min = MIN_SECRET_CHARACTERS)]
    ShortSecret(usize),
    #[error("the engine's secret cannot be sent in a header: only visible ASCII characters are allowed, no spaces")]
    Unsendable,
    #[error(
        "--engine-listen is {0}, which other machines can reach, without TLS: give --engine-tls-cert and --engine-tls-key, \
         or --engine-without-tls on a network that you trust"
    )]
    PlainText(std::net::SocketAddr),
    #[error(
        "--engine-tls-ca has no effect on --engine-listen without a certificate: give --engine-tls-cert and --engine-tls-key"
    )]
    NoCertificate,
}

/// `None`: none of `--engine-listen`, `--replica` and `--replica-file` is given. `secret` is the variable's value.
pub(crate) fn read(args: &Args, secret: Option<String>) -> Result<Option<Access>, AccessError> {
    if args.engine_listen.is_none() && args.replica.is_empty() && args.replica_file.is_none() {
        return Ok(None);
    }
    let identity = match (&args.engine_tls_cert, &args.engine_tls_key) {
        (Some(certificates), Some(key)) => Some(Identity {
            certificates: read_file("engine-tls-cert", certificates)?,
            key: read_file("engine-tls-key", key)?,
        }),
        _ => None,
    };
    let authority = args.engine_tls_ca.as_deref().map(|path| read_file("engine-tls-ca", path)).transpose()?;
    if args.engine_listen.is_some() && authority.is_some() && identity.is_none() {
        return Err(AccessError::NoCertificate);
    }
    let beyond_machine = args.engine_listen.filter(|address| !address.ip().is_loopback());
    if let Some(address) = beyond_machine.filter(|_| identity.is_none() && !args.engine_without_tls) {
        return Err(AccessError::PlainText(address));
    }
    let secret = match &args.engine_secret_file {
        Some(path) => read_file("engine-secret-file", path)?.trim().to_owned(),
        None => secret.ok_or(AccessError::NoSecret)?,
    };
    if secret.len() < MIN_SECRET_CHARACTERS {
        return Err(AccessError::ShortSecret(secret.len()));
    }
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(AccessError::Unsendable);
    }
    Ok(Some(Access { secret, identity, authority, allows_plain_text: args.engine_without_tls }))
}

fn read_file(flag: &'static str, path: &Path) -> Result<String, AccessError> {
    std::fs::read_to_string(path).map_err(|source| AccessError::Read { flag, path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const GOOD: &str = "0123456789abcdef";

    fn refusal(flags: &[&str], secret: Option<&str>) -> String {
        let args = Args::try_parse_from([&["penstock"], flags].concat()).unwrap();
        read(&args, secret.map(str::to_owned)).unwrap_err().to_string()
    }

    #[test]
    fn a_listener_beyond_this_machine_needs_tls_or_the_dangerous_flag() {
        let flags = ["--engine-listen", "0.0.0.0:1"];
        assert!(refusal(&flags, Some(GOOD)).contains("--engine-listen is 0.0.0.0:1, which other machines can reach"));
        for flags in
            [&["--engine-listen", "127.0.0.1:1"][..], &["--engine-listen", "0.0.0.0:1", "--engine-without-tls"]]
        {
            let args = Args::try_parse_from([&["penstock"], flags].concat()).unwrap();
            assert!(read(&args, Some(GOOD.to_owned())).unwrap().is_some());
        }
        let args = Args::try_parse_from(["penstock"]).unwrap();
        assert!(read(&args, None).unwrap().is_none());
    }

    #[test]
    fn an_authority_without_a_certificate_is_refused() {
        let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let flags = ["--engine-listen", "127.0.0.1:1", "--engine-tls-ca", authority];
        assert!(refusal(&flags, Some(GOOD)).contains("--engine-tls-ca has no effect"));
    }

    #[test]
    fn a_secret_that_is_missing_short_or_unsendable_is_refused_without_being_printed() {
        let flags = ["--replica", "http://127.0.0.1:1"];
        assert!(refusal(&flags, None).contains("need a secret"));
        let short = refusal(&flags, Some("hunter2"));
        assert!(short.contains("has 7 characters") && !short.contains("hunter2"), "{short}");
        assert!(refusal(&flags, Some("schlüssel schlüssel")).contains("visible ASCII"));
    }
}
