//! Visible effects of upstream's fixes: statements with different answers before and after. Only for fixes whose fault
//! can be shown without harm to the server.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use stillpoint_patch_tests::postgres::{Cluster, Session};
use stillpoint_patch_tests::wait;

/// Statements that create the objects for the others.
const SETUP: [&str; 12] = [
    "CREATE EXTENSION intarray",
    "CREATE EXTENSION ltree",
    "CREATE EXTENSION pgcrypto",
    "CREATE EXTENSION refint",
    "CREATE ROLE visitor",
    "CREATE TABLE keys (id text)",
    "CREATE TABLE refs (ref text)",
    "INSERT INTO keys VALUES ('its')",
    "INSERT INTO refs VALUES ('its')",
    "CREATE TRIGGER cascade BEFORE UPDATE ON keys FOR EACH ROW \
     EXECUTE PROCEDURE check_foreign_key(1, 'cascade', 'id', 'refs', 'ref')",
    "CREATE TABLE wide (c text)",
    "ALTER TABLE wide ALTER COLUMN c SET STORAGE EXTERNAL",
];
const FILL: &str = "INSERT INTO wide SELECT repeat(chr(8364), 5000)";

/// One fix, and statements that show it.
struct Effect {
    fix: &'static str,
    /// Statements, all on one connection; the answer of the last one counts, or the first error. Empty: see
    /// [`negotiate`].
    ask: &'static [&'static str],
    before: &'static str,
    after: &'static str,
}

const EFFECTS: [Effect; 9] = [
    Effect {
        fix: "0012",
        ask: &["SELECT ARRAY[[11, 12], [13, 14]]::oidvector"],
        before: "\n1 1",
        after: "not a valid oidvector",
    },
    Effect {
        fix: "0014",
        ask: &[
            "BEGIN",
            "SET LOCAL ROLE visitor",
            "CREATE OPERATOR public.=!= \
             (FUNCTION = int4eq, LEFTARG = int4, RIGHTARG = int4, RESTRICT = _int_matchsel)",
            "SELECT count(*) FROM pg_operator WHERE oprname = '=!='",
        ],
        before: "\n1",
        after: "must be superuser",
    },
    // a fault of 0019, repaired by 0023
    Effect { fix: "0023", ask: &["SELECT substring(c, 1, 1) FROM wide"], before: "invalid byte", after: "\n€" },
    Effect {
        fix: "0028",
        ask: &["BEGIN", "UPDATE keys SET id = 'it''s'", "SELECT ref FROM refs"],
        before: "at or near",
        after: "\nit's",
    },
    Effect { fix: "0030", ask: &[], before: "goes on", after: "refuses" },
    Effect { fix: "0036", ask: &["SET TimeZone TO '<x%%y>3'", "SELECT timeofday()"], before: "x%y", after: "x%%y" },
    Effect {
        fix: "0039",
        ask: &["SELECT ts_headline('some words', 'others'::tsquery, 'StartSel=' || repeat('x', 40000))"],
        before: "some words",
        after: "is too long",
    },
    Effect {
        fix: "0046",
        ask: &["SELECT ('1 | ' || repeat('2 & ', 17000) || '3')::query_int IS NULL"],
        before: "\nf",
        after: "too complex",
    },
    Effect {
        fix: "0038",
        ask: &["SELECT (repeat(repeat('x', 200) || '|', 320) || 'x')::lquery IS NULL"],
        before: "\nf",
        after: "level is too large",
    },
];

/// Creates the objects that the statements need.
pub(crate) fn prepare(cluster: &Cluster) -> Result<(), String> {
    let mut session = cluster.session();
    for statement in SETUP.into_iter().chain([FILL]) {
        session.ask(statement).map_err(|e| format!("{statement}: {e}"))?;
    }
    Ok(())
}

/// Returns the present answer; `None` for a fix without visible effect.
pub(crate) fn show(fix: &str, cluster: &Cluster) -> Result<Option<String>, String> {
    let Some(effect) = EFFECTS.iter().find(|effect| effect.fix == fix) else { return Ok(None) };
    if effect.ask.is_empty() {
        return negotiate(cluster).map(Some).map_err(|e| format!("negotiate: {e}"));
    }
    let mut session: Session = cluster.session();
    let mut shown = String::new();
    for statement in effect.ask {
        match session.ask(statement) {
            Ok(answer) => shown = answer.all(),
            Err(error) if error.starts_with("connection lost") => return Err(format!("{statement}: {error}")),
            Err(error) => return Ok(Some(error)),
        }
    }
    Ok(Some(shown))
}

/// Returns the visible effect of a fix, after the fix became active.
pub(crate) fn compare(fix: &str, before: &Option<String>, cluster: &Cluster) -> Result<Option<String>, String> {
    let Some(effect) = EFFECTS.iter().find(|effect| effect.fix == fix) else { return Ok(None) };
    let Some(before) = before else { return Ok(None) };
    let after = show(fix, cluster)?.unwrap_or_default();
    let one_line = |text: &str| text.trim().lines().last().unwrap_or_default().chars().take(60).collect::<String>();
    let seen = before.contains(effect.before) && !before.contains(effect.after) && after.contains(effect.after);
    Ok(seen.then(|| format!("`{}` becomes `{}`", one_line(before), one_line(&after))))
}

/// Requests encryption three times, in turns: the third time is once too often.
fn negotiate(cluster: &Cluster) -> std::io::Result<String> {
    const SSL: u32 = 80_877_103;
    const GSS: u32 = 80_877_104;
    let mut stream = UnixStream::connect(cluster.socket())?;
    stream.set_read_timeout(Some(wait::WAIT_TIMEOUT))?;
    let mut answer = [0];
    for code in [SSL, GSS, SSL] {
        stream.write_all(&[8u32.to_be_bytes(), code.to_be_bytes()].concat())?;
        stream.read_exact(&mut answer)?;
    }
    Ok(if answer == *b"N" { "the server goes on".into() } else { "the server refuses".into() })
}
