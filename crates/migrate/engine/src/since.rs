//! What was defined on the target since clients went there: the way back would drop it, as it repeats rows alone.
//!
//! What there was at the switch lies beside the journal, each thing with a name of its own and a sum of all that makes it up.
//! Nothing of that changes when a server looks after itself (VACUUM, ANALYZE, REINDEX, TRUNCATE), nor by our own doing.

use crate::inventory::{USER_SCHEMA, text};
use crate::journal::{self, Phase, Record};
use crate::link::{Link, Purpose};
use crate::{Error, Options};
use std::collections::BTreeMap;

/// Sums of definitions by kind and name.
pub(crate) type Definitions = BTreeMap<String, String>;

/// Catalogues of things in schemas, with the column that names the schema.
const IN_SCHEMAS: [(&str, &str); 11] = [
    ("pg_proc", "pronamespace"),
    ("pg_statistic_ext", "stxnamespace"),
    ("pg_operator", "oprnamespace"),
    ("pg_opclass", "opcnamespace"),
    ("pg_opfamily", "opfnamespace"),
    ("pg_collation", "collnamespace"),
    ("pg_conversion", "connamespace"),
    ("pg_ts_config", "cfgnamespace"),
    ("pg_ts_dict", "dictnamespace"),
    ("pg_ts_parser", "prsnamespace"),
    ("pg_ts_template", "tmplnamespace"),
];
/// Catalogues of things outside of schemas, of which those are the user's that are numbered as such.
const BESIDE_SCHEMAS: [&str; 9] = [
    "pg_cast",
    "pg_language",
    "pg_extension",
    "pg_default_acl",
    "pg_event_trigger",
    "pg_foreign_data_wrapper",
    "pg_foreign_server",
    "pg_user_mapping",
    "pg_transform",
];
/// Catalogues of what belongs to a relation, with the column that names it and what changes with the definition.
const OF_RELATIONS: [(&str, &str, &str); 8] = [
    (
        "pg_attribute",
        "attrelid",
        "concat_ws(' ', x.attnum, x.attname, x.atttypid, x.atttypmod, x.attnotnull, x.attcollation, x.attidentity, \
         x.attgenerated, x.attisdropped, x.attacl, x.attoptions, x.attstorage, x.attcompression, x.attstattarget)",
    ),
    ("pg_attrdef", "adrelid", "x.adnum || ' ' || x.xmin::text"),
    ("pg_constraint", "conrelid", "x.conname || ' ' || x.xmin::text"),
    ("pg_trigger", "tgrelid", "CASE WHEN NOT x.tgisinternal THEN x.tgname || ' ' || x.xmin::text END"),
    ("pg_rewrite", "ev_class", "x.rulename || ' ' || x.xmin::text"),
    ("pg_policy", "polrelid", "x.polname || ' ' || x.xmin::text"),
    ("pg_inherits", "inhrelid", "x.inhparent::text"),
    ("pg_sequence", "seqrelid", "x::text"),
];

/// A question for kind, name and sum of every definition.
fn question() -> String {
    let relations = format!("c.relpersistence <> 't' AND c.relkind <> 't' AND {USER_SCHEMA}");
    let mut parts = vec![
        // An index is what its row says, however often it is built anew. What would write that as text waits for locks.
        format!(
            "SELECT c.tableoid, c.oid, concat_ws(' ', c.relowner, c.relacl, c.reloptions, c.relrowsecurity, c.relam, \
             c.relforcerowsecurity, c.relreplident, c.relpersistence, c.relpartbound::text, (SELECT (to_jsonb(i) - \
             '{{indexrelid,indcheckxmin,indisready,indislive,indisclustered}}'::text[])::text FROM pg_index i \
             WHERE i.indexrelid = c.oid)) \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {relations}"
        ),
        format!("SELECT n.tableoid, n.oid, concat_ws(' ', n.nspowner, n.nspacl) FROM pg_namespace n WHERE {USER_SCHEMA}"),
        // Rows of tables and arrays have types that go with what they are of.
        format!(
            "SELECT t.tableoid, t.oid, t.xmin::text FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace \
             WHERE {USER_SCHEMA} AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = t.tableoid \
             AND d.objid = t.oid AND d.deptype = 'i')"
        ),
        "SELECT 'pg_type'::regclass::oid, enumtypid, concat_ws(' ', enumlabel, enumsortorder) FROM pg_enum".into(),
        "SELECT 'pg_type'::regclass::oid, contypid, conname || ' ' || xmin::text FROM pg_constraint \
         WHERE contypid >= 16384"
            .into(),
        "SELECT classoid, objoid, objsubid || ' ' || md5(description) FROM pg_description WHERE objoid >= 16384".into(),
        "SELECT 'pg_largeobject'::regclass::oid, oid, xmin::text FROM pg_largeobject_metadata".into(),
        "SELECT tableoid, oid, xmin::text FROM pg_publication WHERE pubname !~ '^stillpoint_'".into(),
        // The door that we shut and open is none of it.
        "SELECT d.tableoid, d.oid, a::text FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a \
         WHERE d.datname = current_database()"
            .into(),
        "SELECT d.tableoid, d.oid, s.setrole || ' ' || setting FROM pg_database d JOIN pg_db_role_setting s \
         ON s.setdatabase = d.oid, unnest(s.setconfig) setting WHERE d.datname = current_database() \
         AND setting !~ '^default_transaction_read_only='"
            .into(),
    ];
    parts.extend(IN_SCHEMAS.map(|(catalogue, schema)| {
        format!(
            "SELECT x.tableoid, x.oid, x.xmin::text FROM {catalogue} x JOIN pg_namespace n ON n.oid = x.{schema} \
             WHERE {USER_SCHEMA}"
        )
    }));
    parts.extend(
        BESIDE_SCHEMAS.map(|catalogue| format!("SELECT tableoid, oid, xmin::text FROM {catalogue} WHERE oid >= 16384")),
    );
    parts.extend(OF_RELATIONS.map(|(catalogue, relation, mark)| {
        format!(
            "SELECT c.tableoid, c.oid, '{catalogue} ' || {mark} FROM {catalogue} x JOIN pg_class c ON c.oid = x.{relation} \
             JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind NOT IN ('i', 'I') AND {relations}"
        )
    }));
    format!(
        "SELECT concat(named.type, ' ', named.identity), sum FROM (SELECT class, object, \
         md5(string_agg(mark, ',' ORDER BY mark)) AS sum FROM ({}) AS marks(class, object, mark) \
         GROUP BY class, object) AS things, LATERAL pg_identify_object(class, object, 0) AS named \
         WHERE NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = class AND d.objid = object AND d.deptype = 'e')",
        parts.join(" UNION ALL ")
    )
}

/// All definitions of the user.
pub(crate) async fn read(link: &mut Link) -> Result<Definitions, Error> {
    Ok(link.query(&question()).await?.iter().map(|row| (text(row, 0), text(row, 1))).collect())
}

/// What differs, for people.
fn differences(then: &Definitions, now: &Definitions) -> Vec<String> {
    let changed = now.iter().filter_map(|(name, sum)| match then.get(name) {
        None => Some(format!("new {name}")),
        Some(before) => (before != sum).then(|| format!("changed {name}")),
    });
    let gone = then.keys().filter(|name| !now.contains_key(*name)).map(|name| format!("dropped {name}"));
    changed.chain(gone).collect()
}

/// What the way back would not bring to the source of this migration's target, for people.
pub(crate) async fn the_switch(options: &Options, target: &mut Link) -> Result<Vec<String>, Error> {
    let Some(then) = journal::definitions(&options.state, &options.source.database)? else {
        return Ok(vec!["whatever it was: the journal does not tell what there was at the switch".into()]);
    };
    Ok(differences(&then, &read(target).await?))
}

/// The same where there is a way back; nothing otherwise.
pub(crate) async fn defined(options: &Options, record: &Record) -> Result<Vec<String>, Error> {
    if !record.way_back || !matches!(record.phase, Phase::Switched | Phase::Returning) {
        return Ok(Vec::new());
    }
    let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    the_switch(options, &mut target).await
}

/// What was defined, changed or dropped on the target since clients went there: [`crate::fallback`] refuses to drop it, unless
/// [`crate::Accepted::definitions_dropped`]. Nothing where there is no way back.
pub async fn defined_since(options: &Options) -> Result<Vec<String>, Error> {
    let options = &options.recorded()?;
    match journal::peek(&options.state, &options.source.database)? {
        Some(record) => defined(options, &record).await,
        None => Ok(Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_changed_and_dropped_are_told_apart() {
        let of = |all: &[(&str, &str)]| all.iter().map(|(name, sum)| ((*name).into(), (*sum).into())).collect();
        let then: Definitions = of(&[("table a", "1"), ("table b", "1"), ("table c", "1")]);
        let now: Definitions = of(&[("table a", "1"), ("table b", "2"), ("view d", "1")]);
        assert_eq!(differences(&then, &now), ["changed table b", "new view d", "dropped table c"]);
        assert_eq!(differences(&then, &then), Vec::<String>::new());
    }
}
