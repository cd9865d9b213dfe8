//! The TLS material of this side of a connection.

/// A certificate chain and its key, as PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate first.
    pub certificates: String,
    /// PKCS #8, SEC 1 or PKCS #1.
    pub key: String,
}

impl Identity {
    pub(crate) fn to_tonic(&self) -> tonic::transport::Identity {
        tonic::transport::Identity::from_pem(&self.certificates, &self.key)
    }
}
