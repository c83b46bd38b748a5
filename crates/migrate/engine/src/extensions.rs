//! Extensions that the target's files put into another schema than they have on the source. A dump names the source's schema, and
//! a server refuses that for an extension with a schema of its own. So these are created before the dump's definitions, where
//! the target's files want them, and the dump's statement finds them there.

use std::collections::HashMap;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, Row, identifier, text};

/// Query for extensions that can be created only in one schema, and that schema.
const SCHEMAS_SQL: &str = "SELECT v.name, v.schema FROM pg_available_extension_versions v JOIN pg_available_extensions e \
     ON e.name = v.name AND e.default_version = v.version WHERE v.schema IS NOT NULL";

/// Creates those of a dump's extensions that `to` has in another schema; `script` holds the dump's statements for extensions.
///
/// # Errors
///
/// An error if the server cannot be asked, or refuses one.
pub(crate) async fn create_relocated(to: &mut Link, script: &str) -> Result<(), Error> {
    let rows = to.query(SCHEMAS_SQL).await?;
    for name in relocated(script, &rows) {
        to.query(&format!("CREATE EXTENSION IF NOT EXISTS {} CASCADE", identifier(&name))).await?;
    }
    Ok(())
}

/// Names of the extensions that the statements put into another schema than `rows` say.
fn relocated(script: &str, rows: &[Row]) -> Vec<String> {
    let schemas: HashMap<String, String> = rows.iter().map(|row| (identifier(&text(row, 0)), text(row, 1))).collect();
    let unquoted = |name: &str| match name.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(inner) => inner.replace("\"\"", "\""),
        None => name.to_owned(),
    };
    let of = |line: &str| {
        let (name, schema) = line.strip_prefix("CREATE EXTENSION IF NOT EXISTS ")?.split_once(" WITH SCHEMA ")?;
        let (name, schema) = (unquoted(name), unquoted(schema.strip_suffix(';')?));
        (*schemas.get(&identifier(&name))? != schema).then_some(name)
    };
    script.lines().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_with_another_schema_are_found() {
        let row = |name: &str, schema: &str| -> Row { vec![Some(name.into()), Some(schema.into())] };
        let rows = [row("jobs", "pg_catalog"), row("odd-name", "a\"b"), row("same", "kept")];
        let script = "-- CREATE EXTENSION IF NOT EXISTS jobs WITH SCHEMA x;\nCREATE EXTENSION IF NOT EXISTS jobs WITH SCHEMA public;\n\
                      CREATE EXTENSION IF NOT EXISTS \"odd-name\" WITH SCHEMA \"a\"\"c\";\n\
                      CREATE EXTENSION IF NOT EXISTS same WITH SCHEMA kept;\n\
                      CREATE EXTENSION IF NOT EXISTS free WITH SCHEMA public;\n";
        assert_eq!(relocated(script, &rows), ["jobs", "odd-name"]);
    }
}
