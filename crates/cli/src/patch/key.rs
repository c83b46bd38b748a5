//! `stillpoint patch key`: make and show keys.

use crate::output::{Failure, Output};
use anyhow::Context;
use serde::Serialize;
use std::path::PathBuf;
use stillpoint_patch_builder::{generate_key, read_secret_key};
use stillpoint_patch_format::PublicKey;

/// Size limit of a key file, in bytes.
const KEY_MAX: u64 = 64 << 10;

/// Arguments of `stillpoint patch key`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch key"))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Create an ed25519 key pair: the secret key signs patches, the public key verifies them where they are applied.
    #[command(after_help = crate::examples::of("stillpoint patch key generate"))]
    Generate {
        /// Directory for `stillpoint-ID.key` (mode 0600) and `stillpoint-ID.pub`.
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
    },
    /// Show the id and the public key of a key file, secret or public.
    #[command(after_help = crate::examples::of("stillpoint patch key show"))]
    Show {
        /// A key file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

#[derive(Serialize)]
struct KeyLine {
    id: String,
    public_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    public_file: Option<PathBuf>,
}

/// Runs `stillpoint patch key`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let line = match args.command {
        Command::Generate { output: directory } => {
            let made = generate_key(&directory).map_err(|e| Failure::failed(e, "no key was made"))?;
            output.line(format_args!("secret key {}: keep it secret, it signs patches", made.secret.display()));
            output.line(format_args!("public key {}: install it where patches are applied", made.public.display()));
            let (secret_file, public_file) = (Some(made.secret), Some(made.public));
            KeyLine { id: made.key.id().to_string(), public_key: hex(&made.key), secret_file, public_file }
        }
        Command::Show { file } => {
            let key = read(&file).map_err(Failure::refused)?;
            KeyLine { id: key.id().to_string(), public_key: hex(&key), secret_file: None, public_file: None }
        }
    };
    output.lines(format_args!("id {}\npublic {}", line.id, line.public_key));
    output.result("key", &line);
    Ok(())
}

fn hex(key: &PublicKey) -> String {
    key.to_text().trim_end().to_owned()
}

fn read(file: &std::path::Path) -> anyhow::Result<PublicKey> {
    if file.extension().is_some_and(|e| e == "key") {
        return Ok(read_secret_key(file)?.public());
    }
    let text = stillpoint_host::file::read_named_text(file, KEY_MAX).context("key file")?;
    PublicKey::parse(&text).with_context(|| format!("key file {}", file.display()))
}
