//! Bytes on disk: header, checksum, signature.

use crate::{Error, Patch, validate};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use sha2::{Digest, Sha256};
use std::fmt;

/// Version of the file format.
pub const VERSION: u32 = 4;
/// Version of a file without changes of data: earlier programs read it too.
const VERSION_WITHOUT_DATA: u32 = 3;
/// Largest number of bytes of data that one patch changes.
pub const DATA_MAX: u64 = 64 << 10;
const MAGIC: &[u8; 8] = b"STILLPT\n";
const FLAG_SIGNED: u32 = 1;
const HEADER_LEN: usize = 8 + 4 + 4 + 8 + 32;
const SIGNATURE_LEN: usize = 8 + 64;
/// Largest accepted body, in bytes: limits the memory of a process that reads a patch from an untrusted place.
pub(crate) const BODY_MAX: usize = 256 << 20;

/// First eight bytes of the SHA-256 of a public key; prints as lower-case hex.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub [u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

/// An ed25519 public key, 32 bytes; its file holds them as 64 hex digits and a newline.
#[derive(Debug, Clone)]
pub struct PublicKey(VerifyingKey);

/// An ed25519 secret key, 32 bytes; its file holds them as 64 hex digits and a newline. Never printed.
#[derive(Clone)]
pub struct SecretKey(SigningKey);

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({})", self.public().id())
    }
}

fn parse_hex32(text: &str) -> Result<[u8; 32], Error> {
    let text = text.trim();
    let mut out = [0; 32];
    hex::decode_to_slice(text, &mut out)
        .map_err(|_| Error::Key(format!("expected 64 hex digits, got {} characters", text.chars().count())))?;
    Ok(out)
}

impl PublicKey {
    /// Reads the text of a public key file.
    ///
    /// # Errors
    /// [`Error::Key`] if the text is not a public key of 64 hex digits.
    pub fn parse(text: &str) -> Result<Self, Error> {
        VerifyingKey::from_bytes(&parse_hex32(text)?).map(PublicKey).map_err(|e| Error::Key(e.to_string()))
    }

    /// The text of a public key file.
    pub fn to_text(&self) -> String {
        hex::encode(self.0.as_bytes()) + "\n"
    }

    /// Identifier of this key in signatures.
    pub fn id(&self) -> KeyId {
        let digest = Sha256::digest(self.0.as_bytes());
        KeyId(std::array::from_fn(|i| digest[i]))
    }
}

impl SecretKey {
    /// A key from 32 random bytes.
    pub fn from_seed(seed: [u8; 32]) -> Self {
        SecretKey(SigningKey::from_bytes(&seed))
    }

    /// Reads the text of a secret key file.
    ///
    /// # Errors
    /// [`Error::Key`] if the text is not a secret key of 64 hex digits.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Ok(Self::from_seed(parse_hex32(text)?))
    }

    /// The text of a secret key file.
    pub fn to_text(&self) -> String {
        hex::encode(self.0.to_bytes()) + "\n"
    }

    /// The public half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }
}

/// A decoded patch file: the patch and the signature as found. The signature is not checked before [`Signed::verify`].
#[derive(Debug, Clone)]
pub struct Signed {
    /// The patch, validated.
    pub patch: Patch,
    /// SHA-256 of the body: the patch's identity.
    pub digest: [u8; 32],
    signature: Option<(KeyId, [u8; 64])>,
    header: [u8; HEADER_LEN],
}

impl Signed {
    /// Key that signed the file, if any.
    pub fn key_id(&self) -> Option<KeyId> {
        self.signature.map(|(id, _)| id)
    }

    /// Checks the signature against the trusted keys and returns the id of the key that made it.
    ///
    /// # Errors
    /// The patch is not signed, its key is not among the trusted ones, or the signature is invalid.
    pub fn verify(&self, trusted: &[PublicKey]) -> Result<KeyId, Error> {
        let (id, signature) = self.signature.ok_or(Error::Unsigned)?;
        let key = trusted.iter().find(|key| key.id() == id).ok_or(Error::UnknownKey(id))?;
        let signature = ed25519_dalek::Signature::from_bytes(&signature);
        key.0.verify_strict(&signed_bytes(&self.header, id), &signature).map_err(|_| Error::Signature(id))?;
        Ok(id)
    }
}

fn signed_bytes(header: &[u8; HEADER_LEN], id: KeyId) -> Vec<u8> {
    [&header[..], &id.0[..]].concat()
}

fn encode_with(patch: &Patch, key: Option<&SecretKey>) -> Result<Vec<u8>, Error> {
    validate::validate(patch)?;
    let mut body = postcard::to_stdvec(patch)?;
    let version = if patch.data.is_empty() { VERSION_WITHOUT_DATA } else { VERSION };
    if version == VERSION {
        body = postcard::to_extend(&patch.data, body)?;
    }
    if body.len() > BODY_MAX {
        return Err(Error::Inconsistent(format!("body of {} bytes exceeds the limit of {BODY_MAX}", body.len())));
    }
    let flags = if key.is_some() { FLAG_SIGNED } else { 0 };
    let mut header = [0u8; HEADER_LEN];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&version.to_le_bytes());
    header[12..16].copy_from_slice(&flags.to_le_bytes());
    header[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    header[24..].copy_from_slice(&Sha256::digest(&body));
    let mut out = header.to_vec();
    if let Some(key) = key {
        let id = key.public().id();
        out.extend_from_slice(&id.0);
        out.extend_from_slice(&key.0.sign(&signed_bytes(&header, id)).to_bytes());
    }
    out.extend_from_slice(&body);
    Ok(out)
}

/// Returns the bytes of an unsigned patch file.
///
/// # Errors
/// The patch breaks a rule, or its body is too large.
pub fn encode(patch: &Patch) -> Result<Vec<u8>, Error> {
    encode_with(patch, None)
}

/// Returns the bytes of a signed patch file.
///
/// # Errors
/// The patch breaks a rule, or its body is too large.
pub fn encode_signed(patch: &Patch, key: &SecretKey) -> Result<Vec<u8>, Error> {
    encode_with(patch, Some(key))
}

/// Reads a patch file: checks the header, length, checksum and body, and every rule of [`Patch`].
///
/// # Errors
/// The file is not a patch file of this version, is damaged, or breaks a rule.
pub fn decode(bytes: &[u8]) -> Result<Signed, Error> {
    if bytes.len() >= 8 && &bytes[..8] != MAGIC {
        return Err(Error::Magic);
    }
    let header: [u8; HEADER_LEN] = bytes
        .get(..HEADER_LEN)
        .and_then(|h| h.try_into().ok())
        .ok_or(Error::Truncated { have: bytes.len(), need: HEADER_LEN })?;
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let version = u32_at(8);
    if ![VERSION_WITHOUT_DATA, VERSION].contains(&version) {
        return Err(Error::Version(version));
    }
    let flags = u32_at(12);
    if flags & !FLAG_SIGNED != 0 {
        return Err(Error::Flags(flags));
    }
    let body_len = u64::from_le_bytes(std::array::from_fn(|i| header[16 + i]));
    let body_len = usize::try_from(body_len)
        .ok()
        .filter(|n| *n <= BODY_MAX)
        .ok_or_else(|| Error::Inconsistent(format!("body of {body_len} bytes exceeds the limit of {BODY_MAX}")))?;
    let body_at = HEADER_LEN + if flags & FLAG_SIGNED != 0 { SIGNATURE_LEN } else { 0 };
    let need = body_at + body_len;
    if bytes.len() < need {
        return Err(Error::Truncated { have: bytes.len(), need });
    }
    if bytes.len() > need {
        return Err(Error::TrailingBytes(bytes.len() - need));
    }
    let body = &bytes[body_at..];
    let digest: [u8; 32] = Sha256::digest(body).into();
    if digest != header[24..] {
        return Err(Error::Checksum);
    }
    let signature = (flags & FLAG_SIGNED != 0).then(|| {
        let block = &bytes[HEADER_LEN..body_at];
        (KeyId(std::array::from_fn(|i| block[i])), std::array::from_fn(|i| block[8 + i]))
    });
    let (mut patch, mut rest) = postcard::take_from_bytes::<Patch>(body)?;
    if version == VERSION {
        (patch.data, rest) = postcard::take_from_bytes(rest)?;
    }
    if !rest.is_empty() {
        return Err(Error::TrailingBytes(rest.len()));
    }
    validate::validate(&patch)?;
    Ok(Signed { patch, digest, signature, header })
}
