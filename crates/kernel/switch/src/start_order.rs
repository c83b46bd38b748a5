//! Order in which systemd starts units. Those that go along are all restored at the same time: each is ready for
//! systemd as soon as its restore begins. Those that stay and start after them are held back until all have been
//! released.

use crate::remaining_units::{UnitProperties, Units};
use crate::unit::{LEADER_AFTER, LEADER_UNIT};
use std::collections::{BTreeMap, BTreeSet};
use stillpoint_kernel_checkpoint::Error;
use stillpoint_kernel_checkpoint::command::run;

/// Target of the shutdown: everything ends before it, and nothing starts after it.
const SHUTDOWN_TARGET: &str = "shutdown.target";

/// Units that systemd knows, each with those that it starts after.
pub(crate) struct StartOrder(BTreeMap<String, BTreeSet<String>>);

/// Effect of a switch on an order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DelayedUnits {
    /// Units that start only after those of the switch have been released.
    pub(crate) units: Vec<String>,
    /// Reasons why there is no such order.
    pub(crate) refused: Vec<String>,
}

impl StartOrder {
    /// Reads the order from systemd.
    pub(crate) fn read() -> Result<Self, Error> {
        let arguments = ["show", "--all", "--property=Id", "--property=After", "*"];
        run("query the order of units", "systemctl", &arguments, None).map(|text| StartOrder::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let after = |unit: UnitProperties| unit.list("After").map(ToOwned::to_owned).collect();
        StartOrder(Units::parse(text).known.into_iter().map(|(name, unit)| (name, after(unit))).collect())
    }

    /// Returns the units that start after a unit directly.
    fn successors(&self, unit: &str) -> impl Iterator<Item = &str> {
        let is_after = move |(name, after): &(&String, &BTreeSet<String>)| {
            name.as_str() != SHUTDOWN_TARGET && after.contains(unit)
        };
        self.0.iter().filter(is_after).map(|(name, _)| name.as_str())
    }

    /// Returns the units that start after a unit, directly or through others.
    fn followers<'o>(&'o self, unit: &str) -> BTreeSet<&'o str> {
        let mut found = BTreeSet::new();
        let mut next: Vec<&str> = self.successors(unit).collect();
        while let Some(unit) = next.pop() {
            if found.insert(unit) {
                next.extend(self.successors(unit));
            }
        }
        found
    }

    /// Returns the units that are held back while these units are restored.
    pub(crate) fn delayed_by(&self, switched: &[String]) -> DelayedUnits {
        let is_switched = |unit: &str| switched.iter().any(|name| name == unit);
        let followers: Vec<(&str, BTreeSet<&str>)> =
            switched.iter().map(|unit| (unit.as_str(), self.followers(unit))).collect();
        let ends = || switched.iter().map(String::as_str).chain(LEADER_AFTER);
        // they cannot wait for the release, as the release waits for units that start after them
        let mut between = BTreeMap::new();
        for (first, followers) in &followers {
            for unit in followers.iter().filter(|unit| !is_switched(unit)) {
                let further = self.followers(unit);
                if let Some(last) = ends().find(|end| unit == end || further.contains(end)) {
                    between.entry(*unit).or_insert((*first, last));
                }
            }
        }
        let refused = between.iter().filter(|(unit, _)| has_effect(unit)).map(|(unit, (first, last))| {
            format!(
                "{unit} starts after {first} and before {last}: it would wait for the release of {first}, which would \
                 wait for {last}; select it for the switch too, or change its order"
            )
        });
        let heads = switched.iter().map(String::as_str).chain(between.keys().copied());
        let delayed: BTreeSet<&str> = heads.flat_map(|unit| self.successors(unit)).collect();
        let delayed = delayed
            .into_iter()
            .filter(|unit| !is_switched(unit) && !between.contains_key(unit) && *unit != LEADER_UNIT);
        DelayedUnits { units: delayed.map(ToOwned::to_owned).collect(), refused: refused.collect() }
    }
}

/// Returns true if a unit is more than a name for others, or a listener for them.
fn has_effect(unit: &str) -> bool {
    unit.rsplit_once('.').is_none_or(|(_, kind)| ["service", "mount", "automount", "swap"].contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an order as systemd would report it, from units and those that each starts after.
    fn order(units: &[(&str, &str)]) -> StartOrder {
        let paragraphs = units.iter().map(|(unit, after)| format!("Id={unit}\nAfter={after}\n"));
        StartOrder::parse(&paragraphs.collect::<Vec<_>>().join("\n"))
    }

    fn delayed_by(order: &StartOrder, switched: &[&str]) -> DelayedUnits {
        order.delayed_by(&switched.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn switched_units_do_not_wait_and_remaining_units_wait_for_all() {
        let order = order(&[
            ("local-fs.target", ""),
            ("db.service", "local-fs.target network.target"),
            ("cache.service", "db.service network.target"),
            ("web.service", "cache.service"),
            ("multi-user.target", "db.service cache.service web.service"),
            ("shutdown.target", "db.service cache.service web.service"),
            ("network.target", "local-fs.target"),
        ]);
        let units = vec!["multi-user.target".to_owned(), "web.service".into()];
        assert_eq!(delayed_by(&order, &["db.service", "cache.service"]), DelayedUnits { units, refused: Vec::new() });
        // alone, the second one is one of those that wait
        let units = delayed_by(&order, &["db.service"]).units;
        assert_eq!(units, ["cache.service", "multi-user.target"]);
    }

    #[test]
    fn a_mere_name_between_two_that_go_along_is_passed_and_what_follows_it_waits() {
        let order = order(&[
            ("dns.service", ""),
            ("nss-lookup.target", "dns.service"),
            ("db.service", "nss-lookup.target"),
            ("mail.service", "nss-lookup.target"),
        ]);
        let units = vec!["mail.service".to_owned()];
        assert_eq!(delayed_by(&order, &["dns.service", "db.service"]), DelayedUnits { units, refused: Vec::new() });
    }

    #[test]
    fn a_service_between_two_that_go_along_is_refused_by_name() {
        let order = order(&[
            ("db.service", ""),
            ("migrate.service", "db.service"),
            ("ready.target", "migrate.service"),
            ("cache.service", "ready.target"),
        ]);
        let refused = delayed_by(&order, &["db.service", "cache.service"]).refused;
        assert_eq!(refused.len(), 1);
        assert!(refused[0].starts_with("migrate.service starts after db.service and before cache.service"));
        assert_eq!(
            delayed_by(&order, &["db.service", "cache.service", "migrate.service"]).refused,
            Vec::<String>::new()
        );
        // and so is a mount that the leader itself waits for
        let order = self::order(&[("fs.service", ""), ("srv.mount", "fs.service"), ("local-fs.target", "srv.mount")]);
        let refused = delayed_by(&order, &["fs.service"]).refused;
        assert!(refused[0].starts_with("srv.mount starts after fs.service and before local-fs.target"), "{refused:?}");
    }
}
