//! TLS of clients, with the proxy's certificate.

use std::path::Path;
use std::sync::Arc;
use stillpoint_migrate_control::{ConfigError, TlsFiles};
use stillpoint_migrate_postgres::tls::{certificates, provider};
use stillpoint_migrate_postgres::{Raw, Stream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

/// ALPN name of the protocol; clients that begin with TLS at once must send it.
const ALPN: &[u8] = b"postgresql";

fn wrong(path: &Path) -> impl Fn(String) -> ConfigError {
    move |why| ConfigError::Tls { path: path.into(), why }
}

/// Builds the acceptor for clients' TLS.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ConfigError> {
    let chain = certificates(&files.certificate).map_err(|error| wrong(&error.path)(error.why))?;
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
