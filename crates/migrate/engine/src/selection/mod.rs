//! A part of a database: the schemas and tables that are moved, by patterns, and everything else that follows from them.
//!
//! What is left out is found in the catalogs each time that the source is looked at, so a table that is made, renamed or moved
//! to another schema meanwhile is in the selection or not as its name says at that moment ([`graph`]). The dump of definitions,
//! the publication, the copy, the comparisons of rows and of definitions all see the same selection.

pub(crate) mod findings;
mod graph;
mod left_out;
mod pattern;

use graph::Relation;
pub(crate) use left_out::LeftOut;
pub use pattern::Pattern;

use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of patterns of each kind.
const PATTERNS_MAX: usize = 1000;

/// The part of a database that is moved. Without patterns it is all of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// Patterns of which one must select what is moved; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    include: Vec<Pattern>,
    /// Patterns for what is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    exclude: Vec<Pattern>,
    /// True if the user accepts that relations are left out that no pattern excludes by name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    leave_rest: bool,
}

impl Selection {
    /// Makes a selection of patterns.
    ///
    /// # Errors
    ///
    /// The reason why one of them is no pattern.
    pub fn parse(include: &[String], exclude: &[String], leave_rest: bool) -> Result<Selection, String> {
        if include.len() > PATTERNS_MAX || exclude.len() > PATTERNS_MAX {
            return Err(format!("there are more than {PATTERNS_MAX} patterns"));
        }
        let patterns = |texts: &[String]| texts.iter().map(|text| Pattern::parse(text)).collect::<Result<Vec<_>, _>>();
        Ok(Selection { include: patterns(include)?, exclude: patterns(exclude)?, leave_rest })
    }

    /// Returns true if it is the whole database.
    pub fn is_all(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }

    /// Returns true if the user accepts that relations are left out that no pattern excludes by name.
    pub(crate) fn leaves_rest(&self) -> bool {
        self.leave_rest
    }

    #[cfg(test)]
    pub(crate) fn excluded(&self) -> &[Pattern] {
        &self.exclude
    }

    fn includes(&self, relation: &Relation) -> bool {
        self.include.is_empty() || self.includes_by_name(relation) || self.includes_schema_of(relation)
    }

    fn includes_by_name(&self, relation: &Relation) -> bool {
        self.include.iter().any(|pattern| pattern.selects_relation(&relation.schema, &relation.name))
    }

    fn includes_schema_of(&self, relation: &Relation) -> bool {
        self.include.iter().any(|pattern| pattern.selects_schema(&relation.schema))
    }

    fn excludes(&self, relation: &Relation) -> bool {
        self.excludes_by_name(relation) || self.exclude.iter().any(|pattern| pattern.selects_schema(&relation.schema))
    }

    fn excludes_by_name(&self, relation: &Relation) -> bool {
        self.exclude.iter().any(|pattern| pattern.selects_relation(&relation.schema, &relation.name))
    }

    /// Returns true if functions, types and the like of a schema are moved; `has_relations` if a table or view of it is.
    fn selects_schema(&self, schema: &str, has_relations: bool) -> bool {
        let is_of = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.selects_schema(schema));
        !is_of(&self.exclude) && (self.include.is_empty() || has_relations || is_of(&self.include))
    }

    /// Patterns that select nothing.
    fn unmatched(&self, schemas: &[(u32, String)], relations: &[Relation]) -> Vec<String> {
        let selects_any = |pattern: &&Pattern| match pattern.is_of_schemas() {
            true => schemas.iter().any(|(_, name)| pattern.selects_schema(name)),
            false => relations.iter().any(|it| pattern.selects_relation(&it.schema, &it.name)),
        };
        let all = self.include.iter().chain(&self.exclude);
        all.filter(|pattern| !selects_any(pattern)).map(|pattern| pattern.text().to_owned()).collect()
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("all of the database");
        }
        let of = |option: &str, patterns: &[Pattern]| {
            patterns.iter().map(|pattern| format!("{option} '{}'", pattern.text())).collect::<Vec<_>>()
        };
        let mut words = [of("--include", &self.include), of("--exclude", &self.exclude)].concat();
        words.extend(self.leave_rest.then(|| "--leave-rest".to_owned()));
        f.write_str(&words.join(" "))
    }
}
