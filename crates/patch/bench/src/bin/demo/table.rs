//! The table at the end: requests of the clients before, during and after each change.

use stillpoint_measure::summary::Latency;
use stillpoint_patch_bench::operation::{Operation, Spread, StopsUs, Why};
use stillpoint_patch_tests::load::LoadResult;

/// One change of the running program.
pub(crate) struct Change {
    /// `apply` or `revert`.
    pub(crate) verb: &'static str,
    /// Name of the patch.
    pub(crate) name: String,
    /// The call and its effects.
    pub(crate) operation: Operation,
}

/// Time before and after each change that is evaluated, in nanoseconds.
pub(crate) const AROUND_NS: u64 = 1_000_000_000;

/// Renders all changes with the requests of the clients, and one line for all of them together.
pub(crate) fn render(changes: &[Change], observed: &LoadResult) -> String {
    let group = |text: &str| format!("  {text:-^31}");
    let quantiles = format!("  {:>7}{:>8}{:>8}{:>8}", "p50", "p99", "p99.9", "max");
    let mut text = format!("   {:<NAME$} {:>9} {:>8} {:>9}", "", "all over", "probed", "all, us");
    ["ms before", "ms during", "ms after"].map(group).iter().for_each(|heading| text += heading);
    text += &format!("\n   {:<NAME$} {:>9} {:>8} {:>9}{}\n", "change", "ms", "us", "stopped", quantiles.repeat(3));
    let mut windows = [Vec::new(), Vec::new(), Vec::new()];
    for change in changes {
        let (from, to) = change.operation.window_ns;
        let own = [(from - AROUND_NS, from), (from, to), (to, to + AROUND_NS)];
        let name = format!("{} {}", change.verb, change.name);
        text += &row(&name, std::slice::from_ref(&change.operation), &own.map(|window| vec![window]), observed);
        own.into_iter().zip(&mut windows).for_each(|(window, all)| all.push(window));
    }
    let operations: Vec<Operation> = changes.iter().map(|change| change.operation.clone()).collect();
    text + &row("all of them together", &operations, &windows, observed)
        + &format!("\n   Over all changes, median: {}.\n", StopsUs::of(&operations))
}

/// Width of the first column.
const NAME: usize = 40;

fn row(name: &str, operations: &[Operation], windows: &[Vec<(u64, u64)>; 3], observed: &LoadResult) -> String {
    let migrated = Spread::of(operations.iter().filter_map(|o| o.migrated_ns).map(|ns| ns as f64 / 1e6).collect());
    let stopped = |why| Spread::us(operations.iter().flat_map(move |operation| operation.stopped(why)));
    let cells: String = windows.iter().map(|windows| latency(&observed.windows(windows).latency)).collect();
    let name: String = name.chars().take(NAME).collect();
    format!(
        "   {name:<NAME$} {:>9.2} {:>8.0} {:>9.0}{cells}\n",
        migrated.max,
        stopped(Why::Probe).median,
        stopped(Why::All).max
    )
}

fn latency(latency: &Latency) -> String {
    let ms = |ns: u64| ns as f64 / 1e6;
    let Latency { p50_ns, p99_ns, p999_ns, max_ns, .. } = *latency;
    format!("  {:>7.2}{:>8.2}{:>8.2}{:>8.2}", ms(p50_ns), ms(p99_ns), ms(p999_ns), ms(max_ns))
}
