//! Smallest and largest time of each step (VLDB'25, table 2): the rows of MariaDB.

use super::{Amount, MODES, apply, revert, start};
use crate::modes::{AppliedPatch, RestartTimes, extremes};
use crate::results::Section;
use stillpoint_patch_tests::mariadb::Policy;
use stillpoint_patch_tests::mariadb::annotation::Annotated;
use stillpoint_patch_tests::mariadb::effect::half;
use stillpoint_patch_tests::mariadb::traffic::{Plan, Traffic, Work};

pub(super) fn steps(server: &Annotated, amount: Amount) -> Section {
    let (mut all, mut restarted) = (Vec::new(), Vec::new());
    for policy in Policy::ALL {
        let mut mariadb = start(server, policy, Work::NoOp, &[]);
        let load = Traffic::start(&mariadb, &Plan { work: Work::NoOp, connections: 8, rate: Some(500.0), first: 0 });
        let name = match policy {
            Policy::ThreadPerConnection => "mariadb, a thread per connection",
            Policy::Pool => "mariadb, pool of threads",
        };
        for mode in MODES {
            for _ in 0..amount.runs {
                for operation in [apply(&mariadb, half(server), mode), revert(&mariadb, mode)] {
                    all.push(AppliedPatch::new(name, mode, "half", operation));
                }
            }
        }
        load.finish();
        restarted
            .push(RestartTimes { server: name, ms: (0..amount.runs).map(|_| mariadb.restart(None).ms()).collect() });
    }
    let mut section = extremes(&all, &restarted);
    section.key = "mariadb-steps";
    section
}
