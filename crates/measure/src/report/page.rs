//! Page: one HTML file with its style and its plots inside; no script, no network.
//!
//! Written by hand: with `maud` 0.27, which escapes by itself, the same page had 450 lines of code in place of 439.

use crate::markup::escape;
use std::fmt::Write;

use super::{OperationReport, Part, Report, Subject, WINDOW_NS, plot};
use crate::record::MarkKind;
use crate::summary::Latency;
use crate::timeline::Ending;

const STYLE: &str = include_str!("style.css");
/// Limit of notes on connections; a server that was restarted has thousands.
const NOTES_MAX: usize = 12;

/// `format!` into the page; writing to a string cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {{ let _ = write!($out, $($arg)*); }};
}

pub(super) fn render(report: &Report) -> String {
    let mut out = String::with_capacity(256 << 10);
    let targets: Vec<String> = report.runs.iter().map(|run| format!("{} at {}", run.protocol, run.target)).collect();
    let title = escape(&targets.join(", "));
    put!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>stillpoint: {title}</title>\n<style>{STYLE}{}</style></head>\n<body><main>\n",
        version_colours(report.series.versions.len())
    );
    header(&mut out, report, &title);
    tiles(&mut out, report);
    latency_figure(&mut out, report);
    phase_table(&mut out, report);
    operation_table(&mut out, report);
    other_figures(&mut out, report);
    kind_table(&mut out, report);
    notes(&mut out, report);
    definitions(&mut out, report);
    put!(out, "</main></body></html>\n");
    out
}

/// Colours of versions: neighbours have very different hues; the original code is grey. The colour scheme sets the lightness.
fn version_colours(versions: usize) -> String {
    let mut css = String::new();
    for version in 0..versions {
        let (chroma, hue) = if version == 0 { (0.03, 250.0) } else { (0.15, (version as f64 * 137.5 + 90.0) % 360.0) };
        put!(css, ".v{version}{{--c:oklch(var(--version-l) {chroma} {hue:.0})}}");
    }
    css
}

fn header(out: &mut String, report: &Report, title: &str) {
    let summary = &report.summary;
    let failed = summary.counts.failed();
    let what = if report.operations.is_empty() { String::new() } else { report.subject().meanwhile(report) };
    let (class, sign) = if report.is_clean() { ("good", "✓") } else { ("bad", "✗") };
    let dropped = report.dropped;
    put!(
        out,
        "<header><p class=\"brand\">stillpoint measure</p><h1>{title}</h1>\
         <p class=\"verdict {class}\"><span>{sign}</span> {} requests, {} failed, {} connections dropped{what}.</p>",
        count(summary.counts.requests),
        count(failed),
        count(dropped)
    );
    for (run, end) in report.runs.iter().zip(&report.ends) {
        put!(
            out,
            "<p class=\"facts\">{:.1} s · {}{} requests a second answered · {} connections, at most {} requests under way on each",
            summary.duration_ns as f64 / 1e9,
            wanted(run.rate, &run.arrivals),
            count(summary.throughput as u64),
            count(u64::from(run.connections)),
            run.pipeline
        );
        if run.keys > 0 {
            put!(out, " · {} keys, values of {} bytes", count(run.keys), count(u64::from(run.value_bytes)));
        }
        match end {
            Some(end) if run.idle + run.blocking > 0 => put!(
                out,
                " · alive at the end: {} of {} idle, {} of {} blocked connections",
                count(u64::from(end.idle_alive)),
                count(u64::from(run.idle)),
                count(u64::from(end.blocking_alive)),
                count(u64::from(run.blocking))
            ),
            Some(_) => {}
            None => put!(out, " · <b class=\"bad\">the record is cut off: the load generator did not end in order</b>"),
        }
        put!(out, "</p>");
    }
    put!(out, "</header>\n");
}

/// Describes the intended rate; a load that waits for its answers has none.
fn wanted(rate: f64, arrivals: &str) -> String {
    if rate > 0.0 {
        format!("{} requests a second wanted ({} arrivals), ", count(rate as u64), escape(arrivals))
    } else {
        String::new()
    }
}

fn tiles(out: &mut String, report: &Report) {
    let counts = &report.summary.counts;
    put!(out, "<section class=\"tiles\">");
    let good = |n: u64| if n == 0 { "good" } else { "bad" };
    let errors = counts.errors + counts.wrong;
    let detail = format!("{} error replies, {} wrong answers", counts.errors, counts.wrong);
    tile(out, good(errors), &count(errors), "errors", &detail);
    let detail = format!("{} requests lost with them", counts.lost);
    tile(out, good(report.dropped), &count(report.dropped), "dropped connections", &detail);
    tile(out, good(counts.timeouts), &count(counts.timeouts), "timed out", "no answer in time");
    let latency = &report.summary.latency;
    let detail = format!("whole run; during operations {}", time(report.during.blackout_ns));
    tile(out, "", &time(report.summary.blackout.duration_ns), "blackout", &detail);
    tile(out, "", &time(latency.p50_ns), "median latency", &format!("p99 {}", time(latency.p99_ns)));
    if report.operations.is_empty() {
        tile(out, "", &time(latency.p999_ns), "p99.9", &format!("max {}", time(latency.max_ns)));
    } else if report.subject() == Subject::Kernel {
        // every request during a switch waits for it: a ratio to others would only show the boot time of a kernel
        let outside = &report.outside.latency;
        let detail = format!("of the {} requests that met none; max {}", count(outside.count), time(outside.max_ns));
        tile(out, "", &time(outside.p999_ns), "p99.9 outside of switches", &detail);
    } else {
        let ratio = report.p999_ratio().map_or("–".into(), |ratio| format!("{ratio:.2}×"));
        let (during, outside) = (&report.during.latency, &report.outside.latency);
        let detail = format!("{} against {}", time(during.p999_ns), time(outside.p999_ns));
        tile(out, "", &ratio, "p99.9 during operations / otherwise", &detail);
    }
    if report.stop.count > 0 {
        let detail = format!("p99 {}, max {}", time(report.stop.p99_ns), time(report.stop.max_ns));
        tile(out, "", &time(report.stop.p50_ns), "median stop of a thread", &detail);
    }
    if report.has_threads() && report.migration.count > 0 {
        let detail = format!("median of {}; max {}", report.migration.count, time(report.migration.max_ns));
        tile(out, "", &time(report.migration.p50_ns), "to full migration", &detail);
    }
    put!(out, "</section>\n");
}

fn tile(out: &mut String, class: &str, value: &str, name: &str, detail: &str) {
    put!(
        out,
        "<div class=\"tile {class}\"><b>{}</b><span>{}</span><small>{}</small></div>",
        escape(value),
        escape(name),
        escape(detail)
    );
}

fn latency_figure(out: &mut String, report: &Report) {
    put!(
        out,
        "<figure><h2>Latency over time</h2><p class=\"legend\"><i class=\"key dot-key\"></i>single requests, coloured by \
         {} <i class=\"key max-key\"></i>maximum <i class=\"key p99-key\"></i>p99 \
         <i class=\"key p50-key\"></i>median of each {}</p><div class=\"scroll\">{}</div>",
        report.subject().coloured_by(),
        time(report.series.bucket_ns),
        plot::latency(report)
    );
    if report.series.versions.len() > 1 {
        put!(out, "<ul class=\"versions\">");
        for (number, names) in report.series.versions.iter().enumerate() {
            let name = match names.split_last() {
                None => report.subject().at_first().into(),
                Some((last, [])) => last.clone(),
                Some((last, below)) => format!("{last} and {} below", below.len()),
            };
            put!(out, "<li><i class=\"v{number}\"></i>{}</li>", escape(&name));
        }
        put!(out, "</ul>");
    }
    put!(out, "</figure>\n");
}

fn other_figures(out: &mut String, report: &Report) {
    put!(
        out,
        "<figure><h2>Right answers a second</h2><div class=\"scroll\">{}</div></figure>\n\
         <figure><h2>Lateness of the load generator itself</h2><p class=\"legend\">Maximum of each {}. A peak in \
         the latency that stands here too is, to that height, the client’s own and not the server’s.</p>\
         <div class=\"scroll\">{}</div></figure>\n",
        plot::throughput(report),
        time(report.series.bucket_ns),
        plot::lateness(report)
    );
    if let Some(stops) = plot::stops(report) {
        put!(
            out,
            "<figure><h2>How long threads were stopped</h2><p class=\"legend\">{} stops in {} operations.</p>\
             <div class=\"scroll\">{stops}</div></figure>\n",
            count(report.stop.count),
            report.operations.len()
        );
    }
}

/// Table of the duration and the purpose of each phase of each operation, if the subject explains its phases.
fn phase_table(out: &mut String, report: &Report) {
    let subject = report.subject();
    let mut names: Vec<&str> = Vec::new();
    for op in &report.operations {
        // a phase that only some operations have is inserted at its place
        let mut next = 0;
        for phase in &op.by_phase {
            next = 1 + names.iter().position(|name| *name == phase.phase).unwrap_or_else(|| {
                names.insert(next, &phase.phase);
                next
            });
        }
    }
    if !names.iter().any(|name| subject.explain(name).is_some()) {
        return;
    }
    put!(
        out,
        "<section><h2>Phase by phase</h2><p class=\"legend\">In the order of time. “Again” means after the return to the old \
         kernel.</p><div class=\"scroll\"><table><thead><tr><th class=\"l\">phase</th>"
    );
    for (number, op) in report.operations.iter().enumerate() {
        put!(out, "<th class=\"wrap\">{} {}</th>", number + 1, escape(&op.operation.operation));
    }
    put!(out, "<th class=\"l\">what happens</th></tr></thead><tbody>");
    for name in names {
        put!(out, "<tr><td class=\"l\">{}</td>", escape(name));
        for op in &report.operations {
            let took = op.by_phase.iter().find(|phase| phase.phase == name).map(|phase| time(phase.duration_ns));
            put!(out, "<td>{}</td>", took.unwrap_or_else(|| "–".into()));
        }
        put!(out, "<td class=\"l wrap\">{}</td></tr>", subject.explain(name).unwrap_or(""));
    }
    put!(out, "<tr><td class=\"l\"><b>blackout</b></td>");
    for op in &report.operations {
        put!(out, "<td><b>{}</b></td>", time(op.during.blackout_ns));
    }
    put!(out, "<td class=\"l wrap\">the longest interval in which clients waited and none got an answer</td></tr>");
    put!(out, "</tbody></table></div></section>\n");
}

fn operation_table(out: &mut String, report: &Report) {
    if report.operations.is_empty() {
        return;
    }
    put!(
        out,
        "<section><h2>Each operation, before, during and after</h2><div class=\"scroll\"><table class=\"wide\"><thead>\
         <tr><th rowspan=\"2\" class=\"l\">operation</th>{}<th colspan=\"7\" class=\"g\">requests</th></tr>\
         <tr>{}<th class=\"g l\">when</th><th>number</th><th>p50</th>\
         <th>p99</th><th>p99.9</th><th>max</th><th>blackout</th></tr></thead>",
        if report.has_threads() {
            "<th rowspan=\"2\">threads</th><th rowspan=\"2\">to full<br>migration</th>\
             <th colspan=\"3\" class=\"g\">a thread was stopped</th>"
        } else {
            ""
        },
        if report.has_threads() { "<th class=\"g\">median</th><th>p99</th><th>max</th>" } else { "" }
    );
    for (number, op) in report.operations.iter().enumerate() {
        operation_rows(out, report, number, op);
    }
    put!(out, "<tbody class=\"all\"><tr><td class=\"l\" rowspan=\"2\"><b>all</b></td>");
    if report.has_threads() {
        let migration = if report.migration.count > 0 { time(report.migration.p50_ns) } else { "–".into() };
        put!(out, "<td rowspan=\"2\"></td><td rowspan=\"2\">{migration}</td>");
        stop_cells(out, &report.stop, 2);
    }
    part_cells(out, "outside", &report.outside);
    put!(out, "</tr><tr class=\"during\">");
    part_cells(out, "during", &report.during);
    put!(
        out,
        "</tr></tbody></table></div><p class=\"legend\">Last rows: {}all requests that overlapped no operation (outside), and all that overlapped one (during).</p></section>\n",
        if report.has_threads() { "the median time to full migration; " } else { "" }
    );
}

fn operation_rows(out: &mut String, report: &Report, number: usize, op: &OperationReport) {
    let operation = &op.operation;
    let result = match &operation.ending {
        Ending::Committed => String::new(),
        Ending::FellBack { reason } => format!("<small class=\"bad\">fell back: {}</small>", escape(reason)),
        Ending::AlreadyThere => "<small>no change needed</small>".into(),
        Ending::Open if operation.operation == "check" => String::new(),
        Ending::Open => "<small class=\"bad\">not finished</small>".into(),
    };
    let busy: Vec<String> = operation.busy.iter().map(|(name, times)| format!("{name} ({times}×)")).collect();
    let busy =
        if busy.is_empty() { String::new() } else { format!("<small>waited for {}</small>", escape(&busy.join(", "))) };
    let phases: Vec<String> =
        op.by_phase.iter().map(|phase| format!("{} {}", phase.phase, time(phase.duration_ns))).collect();
    // explained phases have a table of their own
    let explained = op.by_phase.iter().any(|phase| report.subject().explain(&phase.phase).is_some());
    let phases = if explained { String::new() } else { format!("<small>{}</small>", escape(&phases.join(" · "))) };
    let failed = op.during.counts.failed();
    let failed = if failed == 0 { String::new() } else { format!("<small class=\"bad\">{failed} failed</small>") };
    let version = report.series.version_at(operation.ended_ns);
    let names = escape(&operation.patches.join(", "));
    put!(
        out,
        "<tbody><tr><td class=\"l\" rowspan=\"3\"><i class=\"v{version}\"></i>{} {} <b>{names}</b>{result}{phases}{busy}{failed}</td>",
        number + 1,
        escape(&operation.operation)
    );
    if report.has_threads() {
        let migration = operation.migration_ns.map_or("–".into(), time);
        put!(out, "<td rowspan=\"3\">{}</td><td rowspan=\"3\">{migration}</td>", operation.threads);
        stop_cells(out, &op.stop, 3);
    }
    part_cells(out, "before", &op.before);
    put!(out, "</tr><tr class=\"during\">");
    part_cells(out, "during", &op.during);
    put!(out, "</tr><tr>");
    part_cells(out, "after", &op.after);
    put!(out, "</tr></tbody>");
}

fn stop_cells(out: &mut String, stop: &Latency, rows: u32) {
    let [p50, p99, max] =
        [stop.p50_ns, stop.p99_ns, stop.max_ns].map(|ns| if stop.count == 0 { String::from("–") } else { time(ns) });
    put!(
        out,
        "<td class=\"g\" rowspan=\"{rows}\">{p50}</td><td rowspan=\"{rows}\">{p99}</td><td rowspan=\"{rows}\">{max}</td>"
    );
}

fn part_cells(out: &mut String, when: &str, part: &Part) {
    let latency = &part.latency;
    put!(out, "<td class=\"g l\">{when}</td><td>{}</td>", count(part.counts.requests));
    for ns in [latency.p50_ns, latency.p99_ns, latency.p999_ns, latency.max_ns, part.blackout_ns] {
        let text = if latency.count == 0 { "–".into() } else { time(ns) };
        put!(out, "<td>{text}</td>");
    }
}

fn kind_table(out: &mut String, report: &Report) {
    put!(
        out,
        "<section><h2>By kind of request</h2><div class=\"scroll\"><table><thead><tr><th class=\"l\">kind</th>\
         <th>requests</th><th>failed</th><th>p50</th><th>p90</th><th>p99</th><th>p99.9</th><th>max</th></tr></thead><tbody>"
    );
    let mut row = |name: &str, requests: u64, failed: String, latency: &Latency| {
        put!(out, "<tr><td class=\"l\">{}</td><td>{}</td><td>{failed}</td>", escape(name), count(requests));
        for ns in [latency.p50_ns, latency.p90_ns, latency.p99_ns, latency.p999_ns, latency.max_ns] {
            put!(out, "<td>{}</td>", time(ns));
        }
        put!(out, "</tr>");
    };
    for kind in &report.summary.kinds {
        row(&kind.kind, kind.counts.requests, count(kind.counts.failed()), &kind.latency);
    }
    let summary = &report.summary;
    row("all", summary.counts.requests, count(summary.counts.failed()), &summary.latency);
    row("lateness of the client", summary.counts.requests, String::new(), &summary.lateness);
    put!(out, "</tbody></table></div></section>\n");
}

fn notes(out: &mut String, report: &Report) {
    let shown = report.marks.iter().filter(|mark| mark.what != MarkKind::Reconnected);
    let lines: Vec<String> = shown
        .map(|mark| {
            let seconds = mark.t_ns.saturating_sub(report.series.from_ns) as f64 / 1e9;
            let what = if mark.what == MarkKind::Dropped { "dropped: " } else { "" };
            format!("{seconds:.3} s, connection {}: {what}{}", mark.connection, mark.text)
        })
        .chain(report.warnings.iter().cloned())
        .collect();
    if lines.is_empty() {
        return;
    }
    put!(out, "<section><h2>Errors and warnings</h2><ul class=\"notes\">");
    for line in lines.iter().take(NOTES_MAX) {
        put!(out, "<li>{}</li>", escape(line));
    }
    if lines.len() > NOTES_MAX {
        put!(out, "<li>and {} more</li>", lines.len() - NOTES_MAX);
    }
    put!(out, "</ul></section>\n");
}

fn definitions(out: &mut String, report: &Report) {
    let window_s = WINDOW_NS / 1_000_000_000;
    let terms = [
        ("latency", "From the moment a request was due to the last byte of its answer. Requests are due by a schedule that does not wait \
                     for answers, so a pause of the server delays every request that was due meanwhile and shows in all of them. A request \
                     that failed counts with the time until it was given up.".to_owned()),
        ("errors, wrong answers", "Error replies; and answers that are not the stored, written or requested value (each value contains its \
                                   key, its writer and the number of the write).".into()),
        ("dropped", "Connections that ended although the client did not end them. Requests under way on them are lost.".into()),
        ("blackout", "The longest interval in which some client waited and none got a right answer: between two right answers, from the \
                      later of the first one and the earliest due time of all requests that ended after it. Time without any request is no \
                      blackout; time with nothing but errors is. An operation is charged with the whole of every such interval that it \
                      touches.".into()),
        ("before, during, after", format!("During: requests under way at any time from the operation’s first phase to its last event. \
                                           Before and after: those that ended before or were due after it, at most {window_s} s away and \
                                           not beyond the next operation.")),
        ("stopped", "From the moment at which a thread is seen stopped until it continues, as reported by the engine.".into()),
        ("to full migration", "From the start of the transition to the moment when every thread runs the new code.".into()),
        ("lateness", "From the moment a request was due, or a connection had room for it again, to its being handed to the kernel: the \
                      client’s own share of the latency.".into()),
        ("percentiles", "Of an HDR histogram with three digits (at most 0.1 % too high); maxima are exact. All times are CLOCK_MONOTONIC \
                         of one machine, in nanoseconds.".into()),
    ];
    put!(out, "<section><h2>Definitions</h2><dl>");
    let of_threads = ["stopped", "to full migration"];
    for (term, text) in terms.into_iter().filter(|(term, _)| report.has_threads() || !of_threads.contains(term)) {
        put!(out, "<dt>{term}</dt><dd>{}</dd>", escape(&text));
    }
    put!(out, "</dl></section>\n");
}

/// Duration with three digits in a suitable unit.
pub(super) fn time(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns}\u{202f}ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let digits = match value {
        _ if value.fract() == 0.0 => 0,
        100.0.. => 0,
        10.0..100.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}\u{202f}{unit}")
}

/// Number with separated thousands.
pub(super) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_made_for_the_eye() {
        let times = [0, 999, 1_000, 56_932, 123_456, 4_810_000, 1_000_000_000, 12_345_000_000].map(time);
        let times: Vec<_> = times.iter().map(|text| text.replace('\u{202f}', " ")).collect();
        assert_eq!(times, ["0 ns", "999 ns", "1 µs", "56.9 µs", "123 µs", "4.81 ms", "1 s", "12.3 s"]);
        let counts = [0, 999, 1_000, 1_234_567].map(|n| count(n).replace('\u{202f}', " "));
        assert_eq!(counts, ["0", "999", "1 000", "1 234 567"]);
    }

    #[test]
    fn names_cannot_break_out_of_the_page() {
        assert_eq!(escape("<b a=\"1\">&'"), "&lt;b a=&quot;1&quot;&gt;&amp;&#39;");
    }
}
