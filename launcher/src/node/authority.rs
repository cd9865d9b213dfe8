//! Certificate authorities that exist in memory only: one that both sides derive from the nodes' secret, and one that is made for
//! each group of workers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use penstock_router::tls::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PKCS_ED25519,
};
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::node::secret::NodeSecret;

/// The name in an agent's certificate.
pub(crate) const NODE_NAME: &str = "node.penstock";
/// The name in the certificate of the server that uses agents or workers.
pub(crate) const LAUNCHER_NAME: &str = "server.penstock";
/// Separates the key from all other uses of the secret.
const DERIVATION: &[u8] = b"penstock: certificate authority of nodes, 1\0";
/// The head of an Ed25519 private key in PKCS #8 (RFC 8410), before its 32 bytes.
const ED25519_PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// Signs the certificates of all that know the secret, or of one group. `Debug` prints no key.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as DER.
pub(crate) struct Certified {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

impl Authority {
    /// The authority of all that know `secret`: the same key everywhere.
    pub(crate) fn derive(secret: &NodeSecret) -> Result<Self, rcgen::Error> {
        let seed = Sha256::new().chain_update(DERIVATION).chain_update(secret.bytes()).finalize();
        let key = [&ED25519_PKCS8[..], &seed[..]].concat();
        Self::of(KeyPair::from_pkcs8_der_and_sign_algo(&key.as_slice().into(), &PKCS_ED25519)?)
    }

    /// A new authority, for the workers of one group.
    pub(crate) fn make() -> Result<Self, rcgen::Error> {
        Self::of(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)
    }

    fn of(key: KeyPair) -> Result<Self, rcgen::Error> {
        let mut params = named("penstock authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        CertifiedIssuer::self_signed(params, key).map(Self)
    }

    /// The authority's own certificate, as DER.
    pub(crate) fn certificate(&self) -> Vec<u8> {
        self.0.der().to_vec()
    }

    /// A new key with a certificate for `name`.
    pub(crate) fn certify(&self, name: &str) -> Result<Certified, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = named(name);
        params.subject_alt_names = vec![rcgen::SanType::DnsName(name.try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = params.signed_by(&key, &self.0)?.der().to_vec();
        Ok(Certified { certificate, key: key.serialize_der() })
    }

    /// The authority's own certificate, as PEM.
    pub(crate) fn pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate())
    }
}

impl Certified {
    /// The certificate and the key in the types of rustls.
    pub(crate) fn into_der(self) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
        (self.certificate.into(), PrivateKeyDer::Pkcs8(self.key.into()))
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity { certificates: pem("CERTIFICATE", &self.certificate), key: pem("PRIVATE KEY", &self.key) }
    }
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> = (0..text.len()).step_by(64).map(|at| &text[at..text.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_one_authority() {
        let key = |secret: &str| {
            Authority::derive(&NodeSecret::new(secret).unwrap()).unwrap().0.key().public_key_raw().to_vec()
        };
        let secrets = ["0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdeg"];
        assert_eq!(key(secrets[0]), key(secrets[0]));
        assert_ne!(key(secrets[0]), key(secrets[1]));
    }
}
