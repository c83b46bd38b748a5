//! SCRAM-SHA-256 from both sides, with stored keys instead of passwords.
//!
//! A proxy that has a role's verifier can check the role's client (server's side). From the client's proof it computes
//! the client's key, and never sees the password:
//!
//! ```text
//! ClientSignature = HMAC(StoredKey, AuthMessage)      ClientKey = ClientProof XOR ClientSignature
//! ```
//!
//! The same holds when the proxy only listened ([`Transcript`]). With the client's key it can log in to every server
//! whose role has the same verifier. A client's key is as good as a password: it is wiped when dropped and never shown.

use crate::WireError;
use base64ct::{Base64, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use zeroize::{Zeroize, Zeroizing};

/// The only mechanism that is offered. `-PLUS` binds a login to a TLS connection, which ends at the proxy.
pub const MECHANISM: &str = "SCRAM-SHA-256";
/// Default of PostgreSQL for stored passwords.
const ITERATIONS: u32 = 4096;
const SALT_LEN: usize = 16;
/// Limit of the server: more would let a peer keep a processor busy.
const ITERATIONS_MAX: u32 = 10_000_000;

type Key = [u8; 32];

fn hmac(key: &[u8], parts: &[&[u8]]) -> Key {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap_or_else(|_| unreachable!("any length is a key"));
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

fn xor(a: &Key, b: &Key) -> Key {
    std::array::from_fn(|i| a[i] ^ b[i])
}

/// Compares in a time that does not depend on where the difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn decode64(text: &str) -> Option<Vec<u8>> {
    Base64::decode_vec(text).ok()
}

/// Verifier that a server stores for a role: enough to check a proof, too little to make one.
#[derive(Clone, PartialEq, Eq)]
pub struct Verifier {
    iterations: u32,
    salt: Vec<u8>,
    stored_key: Key,
    server_key: Key,
    /// Every proof is refused.
    is_mock: bool,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verifier {{ iterations: {}, .. }}", self.iterations)
    }
}

impl Drop for Verifier {
    fn drop(&mut self) {
        self.stored_key.zeroize();
        self.server_key.zeroize();
    }
}

impl Verifier {
    /// Reads `SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey`, as in `pg_authid.rolpassword`.
    ///
    /// # Errors
    ///
    /// [`WireError::NotAVerifier`] if the text does not have this form.
    pub fn parse(text: &str) -> Result<Verifier, WireError> {
        let parse = || {
            let (mechanism, rest) = text.split_once('$')?;
            let (how, keys) = rest.split_once('$')?;
            let (iterations, salt) = how.split_once(':')?;
            let (stored, server) = keys.split_once(':')?;
            let iterations = iterations.parse().ok().filter(|n| (1..=ITERATIONS_MAX).contains(n))?;
            let verifier = Verifier {
                iterations,
                salt: decode64(salt)?,
                stored_key: decode64(stored)?.try_into().ok()?,
                server_key: decode64(server)?.try_into().ok()?,
                is_mock: false,
            };
            (mechanism == MECHANISM).then_some(verifier)
        };
        parse().ok_or(WireError::NotAVerifier)
    }

    /// A verifier for a role that has none. An exchange with it looks like one with a verifier such as `like`, or with
    /// PostgreSQL's defaults, and ends as after a wrong password: it does not show which roles exist. The salt of a
    /// user is always the same under one `secret`.
    pub fn mock(secret: &[u8; 32], user: &str, like: Option<&Verifier>) -> Verifier {
        let derive = |purpose: &[u8]| hmac(secret, &[purpose, b"\0", user.as_bytes()]);
        let (iterations, len) = like.map_or((ITERATIONS, SALT_LEN), |like| (like.iterations, like.salt.len()));
        let salt = derive(b"salt").into_iter().cycle().take(len).collect();
        let (stored_key, server_key) = (derive(b"stored key"), derive(b"server key"));
        Verifier { iterations, salt, stored_key, server_key, is_mock: true }
    }

    fn of_password(password: &[u8], salt: &[u8], iterations: u32) -> Keys {
        let mut block = hmac(password, &[salt, &1_u32.to_be_bytes()]);
        let mut salted = block;
        for _ in 1..iterations {
            block = hmac(password, &[&block]);
            salted = xor(&salted, &block);
        }
        let client_key = hmac(&salted, &[b"Client Key"]);
        let server_key = hmac(&salted, &[b"Server Key"]);
        salted.zeroize();
        let stored_key = Sha256::digest(client_key).into();
        let verifier = Verifier { iterations, salt: salt.to_vec(), stored_key, server_key, is_mock: false };
        Keys { client_key, verifier }
    }

    fn proof(&self, client_key: &Key, auth_message: &[&[u8]]) -> Key {
        xor(client_key, &hmac(&self.stored_key, auth_message))
    }

    /// Computes the client's key from a proof that was given for `auth_message`.
    fn recover(&self, proof: &Key, auth_message: &[&[u8]]) -> Result<Keys, WireError> {
        let client_key = xor(proof, &hmac(&self.stored_key, auth_message));
        if !same(&Sha256::digest(client_key), &self.stored_key) | self.is_mock {
            return Err(WireError::WrongProof);
        }
        Ok(Keys { client_key, verifier: self.clone() })
    }
}

/// A client's key with its verifier: as good as the password where that verifier is stored.
#[derive(Clone)]
pub struct Keys {
    client_key: Key,
    verifier: Verifier,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys { .. }")
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.client_key.zeroize();
    }
}

/// Secret with which a client logs in.
#[derive(Debug, Clone)]
pub enum Secret {
    /// The password, used unchanged (PostgreSQL normalises non-ASCII passwords).
    Password(Zeroizing<Vec<u8>>),
    /// The keys of one verifier.
    Keys(Keys),
}

fn attribute<'a>(text: &mut std::str::Split<'a, char>, name: char) -> Result<&'a str, WireError> {
    text.next()
        .and_then(|part| part.strip_prefix(name)?.strip_prefix('='))
        .ok_or(WireError::Scram("an attribute is missing or out of order"))
}

fn utf8(data: &[u8]) -> Result<&str, WireError> {
    std::str::from_utf8(data).map_err(|_| WireError::Scram("a message is not text"))
}

/// The client's side of an exchange.
#[derive(Debug)]
pub struct Client {
    nonce: String,
    server_signature: Option<Key>,
}

/// No channel binding: the client does not have the proxy's other connection.
const GS2: &str = "n,,";

impl Client {
    /// Begins an exchange; `nonce` must be random bytes.
    pub fn new(nonce: &[u8; 18]) -> Client {
        Client { nonce: Base64::encode_string(nonce), server_signature: None }
    }

    fn bare(&self) -> String {
        // The server takes the user from the startup packet.
        format!("n=,r={}", self.nonce)
    }

    /// First message of the client.
    pub fn first(&self) -> String {
        format!("{GS2}{}", self.bare())
    }

    /// Last message of the client, in answer to the server's first.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the server's message breaks the exchange, or belongs to another verifier.
    pub fn last(&mut self, server_first: &[u8], secret: &Secret) -> Result<String, WireError> {
        let server_first = utf8(server_first)?;
        let mut parts = server_first.split(',');
        let nonce = attribute(&mut parts, 'r')?;
        if !nonce.starts_with(&self.nonce) || nonce.len() <= self.nonce.len() {
            return Err(WireError::Scram("the server's nonce does not begin with the client's"));
        }
        let salt = decode64(attribute(&mut parts, 's')?).ok_or(WireError::Scram("the salt is not base64"))?;
        let iterations = attribute(&mut parts, 'i')?.parse().ok().filter(|n| (1..=ITERATIONS_MAX).contains(n));
        let iterations = iterations.ok_or(WireError::Scram("the number of iterations is out of range"))?;
        let keys = match secret {
            Secret::Password(password) => Verifier::of_password(password, &salt, iterations),
            Secret::Keys(keys) if (&keys.verifier.salt, keys.verifier.iterations) == (&salt, iterations) => {
                keys.clone()
            }
            Secret::Keys(_) => return Err(WireError::Scram("the server stores another verifier for this role")),
        };
        let without_proof = format!("c={},r={nonce}", Base64::encode_string(GS2.as_bytes()));
        let bare = self.bare();
        let auth_message = [bare.as_bytes(), b",", server_first.as_bytes(), b",", without_proof.as_bytes()];
        let proof = keys.verifier.proof(&keys.client_key, &auth_message);
        self.server_signature = Some(hmac(&keys.verifier.server_key, &auth_message));
        Ok(format!("{without_proof},p={}", Base64::encode_string(&proof)))
    }

    /// Checks the server's last message, which proves that the server knows the verifier too.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the server's message does not prove that.
    pub fn check(&self, server_last: &[u8]) -> Result<(), WireError> {
        let given = utf8(server_last)?.strip_prefix("v=").and_then(decode64);
        match (&self.server_signature, given) {
            (Some(expected), Some(given)) if same(expected, &given) => Ok(()),
            _ => Err(WireError::WrongProof),
        }
    }
}

/// Messages of both sides, for a caller that has the verifier now or later.
#[derive(Clone, Default)]
pub struct Transcript {
    client_first_bare: Zeroizing<Vec<u8>>,
    server_first: Zeroizing<Vec<u8>>,
    without_proof: Zeroizing<Vec<u8>>,
    proof: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for Transcript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transcript { .. }")
    }
}

impl Transcript {
    /// Records the client's first message.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the message is malformed, or requests something that a proxy cannot relay.
    pub fn client_first(&mut self, data: &[u8]) -> Result<(), WireError> {
        self.client_first_bare = Zeroizing::new(bare_of(utf8(data)?)?.as_bytes().to_vec());
        Ok(())
    }

    /// Records the server's first message.
    pub fn server_first(&mut self, data: &[u8]) {
        self.server_first = Zeroizing::new(data.to_vec());
    }

    /// Records the client's last message.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the message has no proof.
    pub fn client_last(&mut self, data: &[u8]) -> Result<(), WireError> {
        let (without_proof, proof) = split_proof(utf8(data)?)?;
        self.without_proof = Zeroizing::new(without_proof.as_bytes().to_vec());
        self.proof = Zeroizing::new(proof.to_vec());
        Ok(())
    }

    /// Computes the client's key if `verifier` is the one of the exchange.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the exchange is not complete, [`WireError::WrongProof`] if the proof does not match the
    /// verifier.
    pub fn recover(&self, verifier: &Verifier) -> Result<Keys, WireError> {
        let proof: Key = self.proof.as_slice().try_into().map_err(|_| WireError::WrongProof)?;
        verifier.recover(&proof, &[&self.client_first_bare, b",", &self.server_first, b",", &self.without_proof])
    }
}

/// The client's first message without its GS2 header; channel binding and authorisation identities are refused.
fn bare_of(client_first: &str) -> Result<&str, WireError> {
    let mut parts = client_first.splitn(3, ',');
    let (binding, identity, bare) = (parts.next(), parts.next(), parts.next());
    match (binding, identity, bare) {
        (Some("n" | "y"), Some(""), Some(bare)) => Ok(bare),
        (Some("n" | "y"), _, _) => Err(WireError::Scram("authorisation identities are not supported")),
        _ => Err(WireError::Scram("a proxy cannot relay channel binding")),
    }
}

fn split_proof(client_last: &str) -> Result<(&str, Key), WireError> {
    let (without_proof, proof) = client_last.rsplit_once(",p=").ok_or(WireError::Scram("the proof is missing"))?;
    let proof = decode64(proof).and_then(|proof| proof.try_into().ok());
    Ok((without_proof, proof.ok_or(WireError::Scram("the proof is not 32 bytes in base64"))?))
}

/// The server's side of an exchange, after the client's first message.
#[derive(Debug)]
pub struct Server {
    verifier: Verifier,
    header: String,
    client_first_bare: String,
    nonce: String,
    server_first: String,
}

impl Server {
    /// Takes the client's first message; `nonce` must be random bytes.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the message is malformed, or requests something that a proxy cannot relay.
    pub fn begin(verifier: Verifier, client_first: &[u8], nonce: &[u8; 18]) -> Result<Server, WireError> {
        let client_first = utf8(client_first)?;
        let bare = bare_of(client_first)?;
        let header = client_first[..client_first.len() - bare.len()].to_owned();
        let mut parts = bare.split(',');
        attribute(&mut parts, 'n')?;
        let theirs = attribute(&mut parts, 'r')?;
        if theirs.is_empty() || !theirs.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(WireError::Scram("the nonce is not printable"));
        }
        let nonce = format!("{theirs}{}", Base64::encode_string(nonce));
        let salt = Base64::encode_string(&verifier.salt);
        let server_first = format!("r={nonce},s={salt},i={}", verifier.iterations);
        Ok(Server { verifier, header, client_first_bare: bare.to_owned(), nonce, server_first })
    }

    /// First message of the server.
    pub fn first(&self) -> &str {
        &self.server_first
    }

    /// Takes the client's last message; returns the server's last message and the client's key.
    ///
    /// # Errors
    ///
    /// [`WireError::Scram`] if the message is malformed or does not continue the exchange, [`WireError::WrongProof`] if
    /// its proof is wrong.
    pub fn end(&self, client_last: &[u8]) -> Result<(String, Keys), WireError> {
        let (without_proof, proof) = split_proof(utf8(client_last)?)?;
        let mut parts = without_proof.split(',');
        if decode64(attribute(&mut parts, 'c')?).as_deref() != Some(self.header.as_bytes()) {
            return Err(WireError::Scram("the header differs from the one of the first message"));
        }
        if attribute(&mut parts, 'r')? != self.nonce {
            return Err(WireError::Scram("the nonce differs from the one of the first message"));
        }
        let auth_message =
            [self.client_first_bare.as_bytes(), b",", self.server_first.as_bytes(), b",", without_proof.as_bytes()];
        let keys = self.verifier.recover(&proof, &auth_message)?;
        let signature = hmac(&self.verifier.server_key, &auth_message);
        Ok((format!("v={}", Base64::encode_string(&signature)), keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stored form of a password in PostgreSQL.
    fn stored(password: &[u8]) -> String {
        let keys = Verifier::of_password(password, b"0123456789abcdef", 4096);
        let encode = |bytes: &[u8]| Base64::encode_string(bytes);
        let Verifier { salt, stored_key, server_key, .. } = &keys.verifier;
        format!("SCRAM-SHA-256$4096:{}${}:{}", encode(salt), encode(stored_key), encode(server_key))
    }

    fn password(text: &str) -> Secret {
        Secret::Password(Zeroizing::new(text.as_bytes().to_vec()))
    }

    #[test]
    fn rfc_7677_has_this_example() {
        let mut client = Client { nonce: "rOprNGfwEbeRWgbNEkqO".into(), server_signature: None };
        // The example names its user and PostgreSQL's clients do not, so only the salted password can be compared.
        let first = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
        assert!(
            client.last(first.as_bytes(), &password("pencil")).unwrap().starts_with("c=biws,r=rOprNGfwEbeRWgbNEkqO%")
        );
        let salt = decode64("W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        let keys = Verifier::of_password(b"pencil", &salt, 4096);
        let without_proof = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
        let message = [&b"n=user,r=rOprNGfwEbeRWgbNEkqO"[..], b",", first.as_bytes(), b",", without_proof];
        let proof = keys.verifier.proof(&keys.client_key, &message);
        assert_eq!(Base64::encode_string(&proof), "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=");
        let signature = hmac(&keys.verifier.server_key, &message);
        assert_eq!(Base64::encode_string(&signature), "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    }

    #[test]
    fn a_key_recovered_by_the_server_or_a_listener_opens_the_next_server() {
        let verifier = Verifier::parse(&stored(b"secret")).unwrap();
        let mut transcript = Transcript::default();
        let mut client = Client::new(&[1; 18]);
        transcript.client_first(client.first().as_bytes()).unwrap();
        let server = Server::begin(verifier.clone(), client.first().as_bytes(), &[2; 18]).unwrap();
        transcript.server_first(server.first().as_bytes());
        let last = client.last(server.first().as_bytes(), &password("secret")).unwrap();
        transcript.client_last(last.as_bytes()).unwrap();
        let (server_last, recovered) = server.end(last.as_bytes()).unwrap();
        client.check(server_last.as_bytes()).unwrap();

        for keys in [recovered, transcript.recover(&verifier).unwrap()] {
            let mut client = Client::new(&[3; 18]);
            let server = Server::begin(verifier.clone(), client.first().as_bytes(), &[4; 18]).unwrap();
            let last = client.last(server.first().as_bytes(), &Secret::Keys(keys)).unwrap();
            let (server_last, _) = server.end(last.as_bytes()).unwrap();
            client.check(server_last.as_bytes()).unwrap();
            assert_eq!(client.check(b"v=AAAA"), Err(WireError::WrongProof));
        }
    }

    #[test]
    fn another_password_or_verifier_is_refused() {
        let verifier = Verifier::parse(&stored(b"secret")).unwrap();
        let mut client = Client::new(&[1; 18]);
        let server = Server::begin(verifier, client.first().as_bytes(), &[2; 18]).unwrap();
        let last = client.last(server.first().as_bytes(), &password("wrong")).unwrap();
        assert_eq!(server.end(last.as_bytes()).unwrap_err(), WireError::WrongProof);
        let keys = Verifier::of_password(b"secret", b"another salt", 4096);
        assert!(matches!(client.last(server.first().as_bytes(), &Secret::Keys(keys)), Err(WireError::Scram(_))));
    }

    #[test]
    fn a_mock_exchange_looks_like_another_and_never_succeeds() {
        let real = Verifier::parse(&stored(b"secret")).unwrap();
        let begin = |verifier: Verifier| Server::begin(verifier, b"n,,n=,r=abc", &[2; 18]).unwrap();
        let shape = |server: &Server| server.first().split(',').map(str::len).collect::<Vec<_>>();
        let mock = |secret: u8, user: &str, like: Option<&Verifier>| begin(Verifier::mock(&[secret; 32], user, like));
        let absent = mock(1, "absent", None);
        assert_eq!(shape(&absent), shape(&begin(real.clone())));
        assert_eq!(absent.first(), mock(1, "absent", Some(&real)).first());
        for other in [mock(2, "absent", None), mock(1, "absent2", None)] {
            assert_ne!(absent.first(), other.first());
        }
        let few = Verifier { iterations: 7, salt: vec![0; 40], ..real };
        assert_eq!(shape(&mock(1, "absent", Some(&few))), shape(&begin(few)));
        // The login fails with any password, and with the key that would fit.
        let mut client = Client { nonce: "abc".into(), server_signature: None };
        let last = client.last(absent.first().as_bytes(), &password("secret")).unwrap();
        assert_eq!(absent.end(last.as_bytes()).unwrap_err(), WireError::WrongProof);
        let keys = Verifier::of_password(b"secret", b"0123456789abcdef", 4096);
        let mut mocked = keys.verifier.clone();
        mocked.is_mock = true;
        let server = Server::begin(mocked, client.first().as_bytes(), &[2; 18]).unwrap();
        let last = client.last(server.first().as_bytes(), &Secret::Keys(keys.clone())).unwrap();
        assert_eq!(server.end(last.as_bytes()).unwrap_err(), WireError::WrongProof);
    }

    #[test]
    fn channel_binding_and_nonsense_are_refused() {
        let verifier = Verifier::parse(&stored(b"x")).unwrap();
        for first in
            ["p=tls-server-end-point,,n=,r=abc", "n,a=x,n=,r=abc", "n,,r=abc", "n,,n=,r=", "", "n,,n=,r=\u{7f}"]
        {
            assert!(Server::begin(verifier.clone(), first.as_bytes(), &[0; 18]).is_err(), "{first:?}");
        }
        for text in [
            "",
            "md5x",
            "SCRAM-SHA-256$0:AA==$AA==:AA==",
            "SCRAM-SHA-256$4096:!$x:y",
            "SCRAM-SHA-1$4096:AA==$AA==:AA==",
        ] {
            assert_eq!(Verifier::parse(text).unwrap_err(), WireError::NotAVerifier, "{text:?}");
        }
    }

    #[test]
    fn secrets_do_not_show() {
        let keys = Verifier::of_password(b"secret", b"salt", 1);
        assert_eq!(format!("{keys:?} {:?}", Transcript::default()), "Keys { .. } Transcript { .. }");
    }
}
