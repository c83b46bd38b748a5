//! TLS by rustls: for clients with the proxy's certificate, and to servers as their `tls` setting requires.

use crate::config::{Server, ServerTls, TlsFiles};
use crate::error::{ConfigError, SessionError};
use crate::stream::{Raw, Stream};
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// ALPN name of the protocol; clients that begin with TLS at once must send it.
const ALPN: &[u8] = b"postgresql";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn wrong(path: &Path) -> impl Fn(String) -> ConfigError {
    move |why| ConfigError::Tls { path: path.into(), why }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let read = || CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>();
    let found = read().map_err(|error| wrong(path)(error.to_string()))?;
    if found.is_empty() { Err(wrong(path)("holds no certificate".into())) } else { Ok(found) }
}

/// Builds the acceptor for clients' TLS.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ConfigError> {
    let chain = certificates(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| wrong(&files.key)(error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let mut config = builder
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| wrong(&files.certificate)(error.to_string()))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Encrypts a connection of a client.
pub(crate) async fn accept(raw: Raw, acceptor: &TlsAcceptor) -> std::io::Result<Encrypted> {
    let stream = acceptor.accept(raw).await?;
    let names_protocol = stream.get_ref().1.alpn_protocol() == Some(ALPN);
    Ok(Encrypted { stream: Stream::Tls(Box::new(stream.into())), names_protocol })
}

/// A client's connection inside TLS.
pub(crate) struct Encrypted {
    pub(crate) stream: Stream,
    /// True if the client has named the protocol inside (ALPN): its bytes are meant for a PostgreSQL server.
    pub(crate) names_protocol: bool,
}

/// Encrypts a connection to `server`, which has agreed to TLS.
pub(crate) async fn connect(raw: Raw, server: &Server) -> Result<Stream, SessionError> {
    match handshake(raw, server).await {
        Ok(stream) => Ok(Stream::Tls(Box::new(stream.into()))),
        Err(why) => Err(SessionError::Unreachable { server: server.to_string(), why: why.into() }),
    }
}

/// Encrypts another connection to a server as the proxy does its own; the error is a text for the operator.
///
/// # Errors
///
/// A text for the operator: the certificates cannot be used, or the handshake failed.
pub async fn encrypt<S>(raw: S, server: &Server) -> Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<S>, String>
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    handshake(raw, server).await
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(raw: S, server: &Server) -> Result<TlsStream<S>, String> {
    let config = client_config(server).map_err(|error| error.to_string())?;
    let name = ServerName::try_from(server.host.clone()).map_err(|error| error.to_string())?;
    TlsConnector::from(Arc::new(config)).connect(name, raw).await.map_err(|error| error.to_string())
}

fn client_config(server: &Server) -> Result<ClientConfig, ConfigError> {
    let builder = ClientConfig::builder_with_provider(provider());
    let builder =
        builder.with_safe_default_protocol_versions().map_err(|error| ConfigError::Invalid(error.to_string()))?;
    Ok(match (server.tls, &server.ca) {
        (ServerTls::VerifyFull, Some(path)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| wrong(path)(error.to_string()))?;
            }
            builder.with_root_certificates(roots).with_no_client_auth()
        }
        (ServerTls::VerifyFull, None) => return Err(ConfigError::Invalid("verify-full needs `ca`".into())),
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
