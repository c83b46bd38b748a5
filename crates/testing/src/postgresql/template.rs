//! A cluster as `initdb` makes it, made once for each version and copied: `initdb` needs 1.5 s of a processor, a copy a
//! fifth of that.
//! fifth of that.
//!
//! A copy gets a system identifier of its own, as from `initdb`: some tests distinguish servers by it.

use super::program::{Programs, postgres_ids};
use crate::{Unavailable, recipes};
use std::fs::Permissions;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

const OPTIONS: [&str; 8] = ["-N", "-A", "trust", "-U", "postgres", "--locale=C", "-E", "UTF8"];

/// Puts a new cluster into `dir`, which belongs to `postgres`, as `data`.
pub(crate) fn place(programs: &Programs, dir: &Path) -> Result<PathBuf, Unavailable> {
    let template = template(programs)?;
    let data = dir.join("data");
    run(Command::new("cp").arg("-a").arg(&template).arg(&data))?;
    let control = data.join("global/pg_control");
    let text = |error| format!("{}: {error}", control.display());
    let mut bytes = std::fs::read(&control).map_err(text)?;
    let identifier = RandomState::new().build_hasher().finish();
    identify(&mut bytes, identifier).map_err(|why| format!("{}: {why}", control.display()))?;
    std::fs::write(&control, bytes).map_err(text)?;
    // Its log contains the identifier as well, and is made again.
    run(programs.command("pg_resetwal").arg("-D").arg(&data).current_dir(dir))?;
    Ok(data)
}

fn template(programs: &Programs) -> Result<PathBuf, Unavailable> {
    let version = run(programs.command("postgres").arg("--version").current_dir("/"))?;
    let inputs = std::iter::once(version.as_bytes()).chain(OPTIONS.map(str::as_bytes)).map(<[u8]>::to_vec);
    let entry = recipes::entry("clusters", "postgresql", &inputs.collect::<Vec<_>>(), |into| {
        // The user `postgres` may have no access to the cache.
        let work = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
        let (user, group) = postgres_ids();
        let opened = chown(work.path(), Some(user), Some(group))
            .and_then(|()| std::fs::set_permissions(work.path(), Permissions::from_mode(0o700)));
        opened.map_err(|e| format!("give {} to postgres: {e}", work.path().display()))?;
        let data = work.path().join("data");
        run(programs.command("initdb").args(OPTIONS).arg("-D").arg(&data).current_dir(work.path()))?;
        run(Command::new("cp").arg("-a").arg(&data).arg(into))?;
        Ok(())
    })?;
    Ok(entry.join("data"))
}

/// Writes a system identifier into the bytes of a `pg_control` (`ControlFileData` of PostgreSQL's
/// `catalog/pg_control.h`): eight bytes at its beginning. A CRC-32C of all bytes before it ends the structure, whose
/// length differs by version.
fn identify(control: &mut [u8], identifier: u64) -> Result<(), String> {
    let checksum = |bytes: &[u8]| crc::Crc::<u32>::new(&crc::CRC_32_ISCSI).checksum(bytes).to_le_bytes();
    let end = (8..control.len().saturating_sub(4))
        .step_by(4)
        .find(|&end| control[end..end + 4] == checksum(&control[..end]) && control[..end].iter().any(|&byte| byte != 0))
        .ok_or("no checksum is found")?;
    control[..8].copy_from_slice(&identifier.to_le_bytes());
    let checksum = checksum(&control[..end]);
    control[end..end + 4].copy_from_slice(&checksum);
    Ok(())
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("run {:?}: {e}", command.get_program()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{command:?} ended with {}: {}", output.status, errors.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_written_with_its_checksum() {
        let checksum = |bytes: &[u8]| crc::Crc::<u32>::new(&crc::CRC_32_ISCSI).checksum(bytes).to_le_bytes();
        let mut control = vec![7_u8; 288];
        control.extend(checksum(&control));
        control.resize(8192, 0);
        identify(&mut control, 0x0102_0304_0506_0708).expect("there is a checksum");
        assert_eq!(control[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(control[288..292], checksum(&control[..288]));
        control[100] = 0;
        identify(&mut control, 1).expect_err("a checksum that is wrong");
    }
}
