//! `experiments/madeus-figures`: the figures of the Madeus paper's evaluation, with `stillpoint migrate run`.
//!
//! ```text
//!  first processor            the other processors
//!  +----------------+         +------------------------------------------------+
//!  | source: node 0 | <------ | proxy <--- emulated browsers (ordering mix)    |
//!  +----------------+         | target: node 1 <--- stillpoint migrate run     |
//!                             +------------------------------------------------+
//! ```
//!
//! Prints a page and writes its values and drawings. Loads are parts of the source's capacity, which is measured first.
//! The page does not judge the results.
#![forbid(unsafe_code)]

mod browsers;
mod chart;
mod modes;
mod series;
mod single_database;
mod sizes;
mod tenants;
mod testbed;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use stillpoint_testing::postgresql::available;

/// A page, its values, and drawings with the suffixes of their files' names.
pub(crate) struct Page {
    pub(crate) text: String,
    pub(crate) values: serde_json::Value,
    pub(crate) drawings: Vec<(&'static str, String)>,
}

const PROCESSOR_LAYOUT: &str =
    "The source has the first processor to itself; clients, the proxy, the target and the tool share the others.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [figure, seconds, items, files] = &arguments[..] else { return usage() };
    let (Ok(seconds), Ok(items)) = (seconds.parse::<f64>(), items.parse::<u32>()) else { return usage() };
    if !(1.0..=3600.0).contains(&seconds) || items < 1000 {
        return usage();
    }
    if !available() {
        return ExitCode::from(3);
    }
    let stretch = Duration::from_secs_f64(seconds);
    let page = match figure.as_str() {
        "fig5" => browsers::measure(stretch, items),
        "fig6" => modes::measure(stretch, items),
        "fig7" => single_database::measure(stretch, items),
        "fig9" => sizes::measure(stretch, items),
        "fig10" => tenants::measure(stretch, items),
        _ => return usage(),
    };
    print!("{}", page.text);
    if figure != "fig6" {
        println!("\n{PROCESSOR_LAYOUT}");
    }
    let written =
        std::fs::write(Path::new(files).with_extension("json"), format!("{}\n", page.values)).and_then(|()| {
            page.drawings.iter().try_for_each(|(name, drawing)| std::fs::write(format!("{files}{name}.svg"), drawing))
        });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {files}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!(
        "usage: madeus-figures fig5|fig6|fig7|fig9|fig10 SECONDS ITEMS FILES (1 to 3600 seconds, 1000 items or more)"
    );
    ExitCode::from(2)
}
