//! `stillpoint patch key`: make and show keys.

use crate::output::{Failure, Output};
use anyhow::Context;
use serde_json::json;
use std::path::PathBuf;
use stillpoint_patch_builder::{generate_key, read_secret_key};
use stillpoint_patch_format::PublicKey;

/// Size limit of a key file, in bytes.
const KEY_MAX: u64 = 64 << 10;

/// Arguments of `stillpoint patch key`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Create an ed25519 key pair: the secret key signs patches, the public key verifies them where they are applied.
    Generate {
        /// Directory for `stillpoint-ID.key` (mode 0600) and `stillpoint-ID.pub`.
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
    },
    /// Show the id and the public key of a key file, secret or public.
    Show {
        /// A key file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Runs `stillpoint patch key`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let (key, files) = match args.command {
        Command::Generate { output: directory } => {
            let made = generate_key(&directory).map_err(|e| Failure::failed(e, "no key was made"))?;
            output.line(format_args!("secret key {}: keep it secret, it signs patches", made.secret.display()));
            output.line(format_args!("public key {}: install it where patches are applied", made.public.display()));
            (made.key, Some([made.secret, made.public].map(|path| path.display().to_string())))
        }
        Command::Show { file } => (read(&file).map_err(Failure::refused)?, None),
    };
    let (id, public_key) = (key.id().to_string(), hex(&key));
    output.lines(format_args!("id {id}\npublic {public_key}"));
    let mut line = json!({"id": id, "public_key": public_key});
    if let Some([secret, public]) = files {
        (line["secret_file"], line["public_file"]) = (secret.into(), public.into());
    }
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
