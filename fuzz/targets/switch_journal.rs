//! Journal of a kernel switch, which decides at each boot, and the lines that a checkpoint writes.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_kernel_switch::{Decision, Journal, State};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Ok(journal) = serde_json::from_slice::<Journal>(input) else { return Corpus::Reject };
    for kernel in [journal.from.as_str(), journal.to.as_str(), "another"] {
        for boot in [journal.boot.as_deref().unwrap_or_default(), "another"] {
            let decision = journal.decide(kernel, boot);
            // an image is used only if none of its processes has run
            assert!(decision != Decision::Restore || journal.state == State::Sealed);
        }
    }
    let (summary, warnings, ports) = (journal.summary(), journal.warnings(), journal.ports());
    assert!(!summary.is_empty() && ports.is_sorted());
    let _ = (warnings, journal.units.iter().map(|unit| journal.image(&unit.name)).count());
    let written = serde_json::to_vec(&journal).expect("what was read is written");
    assert_eq!(serde_json::from_slice::<Journal>(&written).ok(), Some(journal));
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let unit =
        r#"{"name":"redis-server.service","pid":7,"ports":[6379],"health":["redis-cli","ping"],"directories":[]}"#;
    let timing = r#"{"phase":"seal","kernel":"6.1","duration_us":5,"ended_unix_us":9}"#;
    ["prepared", "sealed", "released", "done"]
        .map(|state| {
            format!(
                r#"{{"v":1,"from":"6.1","to":"6.12","boot":"a","state":"{state}","why":null,"begun_on":["6.12"],"pid_max":4000,
                "units":[{unit}],"config":{{}},"timings":[{timing}]}}"#
            )
            .into_bytes()
        })
        .to_vec()
}
