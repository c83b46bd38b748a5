//! The table at the end: what clients saw before, during and after each change.

use stillpoint_e2e::load::Observed;
use stillpoint_e2e::operation::{Operation, Spread};
use stillpoint_measure::summary::Latency;

/// One change of the running program.
pub(crate) struct Change {
    /// `apply` or `revert`.
    pub(crate) verb: &'static str,
    /// Name of the patch.
    pub(crate) name: String,
    /// What the call did.
    pub(crate) operation: Operation,
}

/// Looked at before and after each change.
pub(crate) const AROUND_NS: u64 = 1_000_000_000;

/// All changes with what the clients saw, and one line for all of them together.
pub(crate) fn render(changes: &[Change], observed: &Observed) -> String {
    let mut text = format!(
        "   {:<44} {:>9} {:>17}   {:^23} {:^23} {:^23}\n",
        "", "all over", "stopped, us", "before", "during", "after"
    );
    text += &format!(
        "   {:<44} {:>9} {:>17}   {:^23} {:^23} {:^23}\n",
        "change", "ms", "median / max", "p50 p99 p99.9 max, ms", "p50 p99 p99.9 max, ms", "p50 p99 p99.9 max, ms"
    );
    let mut windows = [Vec::new(), Vec::new(), Vec::new()];
    for change in changes {
        let (from, to) = change.operation.window_ns;
        let own = [(from - AROUND_NS, from), (from, to), (to, to + AROUND_NS)];
        let name = format!("{} {}", change.verb, change.name);
        text += &row(&name, std::slice::from_ref(&change.operation), &own.map(|window| vec![window]), observed);
        own.into_iter().zip(&mut windows).for_each(|(window, all)| all.push(window));
    }
    let operations: Vec<Operation> = changes.iter().map(|change| change.operation.clone()).collect();
    text + &row("all together", &operations, &windows, observed)
}

fn row(name: &str, operations: &[Operation], windows: &[Vec<(u64, u64)>; 3], observed: &Observed) -> String {
    let migrated = Spread::of(operations.iter().filter_map(|o| o.migrated_ns).map(|ns| ns as f64 / 1e6).collect());
    let stopped = Spread::us(operations.iter().flat_map(|operation| operation.stops_ns.clone()));
    let cells: Vec<String> =
        windows.iter().map(|windows| format!("{:^23}", latency(&observed.windows(windows).latency))).collect();
    let name: String = name.chars().take(44).collect();
    let stopped = format!("{:.0} / {:.0}", stopped.median, stopped.max);
    format!("   {name:<44} {:>9.2} {stopped:>17}   {}\n", migrated.max, cells.join(" "))
}

fn latency(latency: &Latency) -> String {
    let ms = |ns: u64| ns as f64 / 1e6;
    let Latency { p50_ns, p99_ns, p999_ns, max_ns, .. } = *latency;
    format!("{:.2} {:.2} {:.2} {:.2}", ms(p50_ns), ms(p99_ns), ms(p999_ns), ms(max_ns))
}
