//! TLS by rustls, to servers as their `tls` setting requires.

use crate::server::{Server, ServerTls};
use crate::stream::Raw;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

/// A file of certificates cannot be used.
#[derive(Debug, Error)]
#[error("{}: {why}", path.display())]
pub struct CertificateError {
    /// Path of the file.
    pub path: PathBuf,
    /// Cause of the failure.
    pub why: String,
}

/// Cryptography that all connections use.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Reads the certificates of a file in PEM format.
///
/// # Errors
///
/// [`CertificateError`] if the file cannot be read, or holds none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let wrong = |why: String| CertificateError { path: path.into(), why };
    let read = || CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>();
    let found = read().map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() { Err(wrong("holds no certificate".into())) } else { Ok(found) }
}

/// Encrypts a connection to `server`, which has agreed to TLS; the error is a text for the operator.
pub(crate) async fn encrypt(raw: Raw, server: &Server) -> Result<TlsStream<Raw>, String> {
    let config = client_config(server)?;
    let name = ServerName::try_from(server.host.clone()).map_err(|error| error.to_string())?;
    TlsConnector::from(Arc::new(config)).connect(name, raw).await.map_err(|error| error.to_string())
}

fn client_config(server: &Server) -> Result<ClientConfig, String> {
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    Ok(match (server.tls, &server.ca) {
        (ServerTls::VerifyFull, Some(path)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path).map_err(|error| error.to_string())? {
                roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
            }
            builder.with_root_certificates(roots).with_no_client_auth()
        }
        (ServerTls::VerifyFull, None) => return Err("verify-full needs `ca`".into()),
        _ => {
            let verifier = Arc::new(AnyCertificate(provider()));
            builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()
        }
    })
}

/// Accepts any certificate, for `require`: the connection is encrypted, and the server's identity is not checked, as
/// with libpq's `sslmode=require`.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
