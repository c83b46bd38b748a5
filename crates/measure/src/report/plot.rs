//! Plots as SVG. Colours come from the page's style sheet, so that they follow its light or dark scheme.
//!
//! Written by hand: the SVG of `plotters` 0.3 has fixed colours in place of classes, and no `<title>` for what the pointer is on.

use std::fmt::Write;

use super::page::{count, time};
use super::series::{Bucket, Series};
use super::{Report, Subject};
use crate::markup::escape;
use crate::timeline::{Ending, Operation};

const WIDTH: f64 = 1120.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 62.0;
/// Height of the slanted names of the operations.
const NAMES_HEIGHT: f64 = 96.0;
/// Height of the bar that shows the version of the code.
const STRIP_HEIGHT: f64 = 18.0;
/// Maximum width of a character in the bar; a longer name of which fewer characters than the minimum fit is left out.
const STRIP_CHAR_WIDTH: f64 = 6.6;
const STRIP_CHARS_MIN: usize = 5;
/// Limit of names: more would overlap, so that only numbers are written.
const NAMES_MAX: usize = 30;
const NAME_CHARS_MAX: usize = 20;

/// Drawing in progress.
struct Svg {
    out: String,
}

/// `format!` into the drawing; writing to a string cannot fail.
macro_rules! draw {
    ($svg:expr, $($arg:tt)*) => {{ let _ = write!($svg.out, $($arg)*); }};
}

impl Svg {
    fn new(height: f64, label: &str) -> Svg {
        let mut svg = Svg { out: String::new() };
        let label = escape(label);
        draw!(svg, r#"<svg viewBox="0 0 {WIDTH} {height:.0}" role="img" aria-label="{label}">"#);
        svg
    }

    fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        draw!(self, r#"<path class="{class}" d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}"/>"#);
    }

    fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let text = escape(text);
        draw!(self, r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{text}</text>"#);
    }

    /// Draws a rectangle; `title` is shown when the pointer is on it.
    fn rect(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64), title: &str) {
        let title = escape(title);
        draw!(
            self,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}"><title>{title}</title></rect>"#
        );
    }

    /// Draws a line through points; `None` interrupts it.
    fn polyline(&mut self, class: &str, points: impl Iterator<Item = Option<(f64, f64)>>) {
        let mut path = String::new();
        let mut pen_up = true;
        for point in points {
            match point {
                Some((x, y)) => {
                    let _ = write!(path, "{}{x:.1} {y:.1}", if pen_up { 'M' } else { 'L' });
                    pen_up = false;
                }
                None => pen_up = true,
            }
        }
        draw!(self, r#"<path class="{class}" d="{path}"/>"#);
    }

    fn finish(mut self) -> String {
        self.out += "</svg>";
        self.out
    }
}

/// Time axis, from left to right.
struct TimeAxis {
    from_ns: u64,
    span_ns: f64,
}

impl TimeAxis {
    fn of(series: &Series) -> TimeAxis {
        let span = series.bucket_ns as f64 * series.buckets.len() as f64;
        TimeAxis { from_ns: series.from_ns, span_ns: span.max(1.0) }
    }

    fn x(&self, t_ns: u64) -> f64 {
        let offset = (t_ns as f64 - self.from_ns as f64).clamp(0.0, self.span_ns);
        LEFT + offset / self.span_ns * (WIDTH - LEFT - RIGHT)
    }

    fn axis(&self, svg: &mut Svg, top: f64, bottom: f64) {
        let seconds = self.span_ns / 1e9;
        let step = nice_step(seconds / 10.0);
        let mut tick = 0.0;
        while tick <= seconds {
            let x = LEFT + tick / seconds * (WIDTH - LEFT - RIGHT);
            svg.line("grid", (x, top), (x, bottom));
            let text = if step < 1.0 { format!("{tick:.1} s") } else { format!("{tick:.0} s") };
            svg.text("tick mid", x, bottom + 18.0, &text);
            tick += step;
        }
    }
}

/// Returns 1, 2 or 5 times a power of ten, not below `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= least).unwrap_or(power)
}

/// Scale of numbers from zero, whose upper end is a tick.
struct Linear {
    step: f64,
    high: f64,
    top: f64,
    bottom: f64,
}

impl Linear {
    fn new(most: f64, step: f64, top: f64, bottom: f64) -> Linear {
        Linear { step, high: (most / step).ceil() * step, top, bottom }
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - value / self.high * (self.bottom - self.top)
    }

    fn axis(&self, svg: &mut Svg) {
        let mut tick = 0.0;
        while tick <= self.high {
            svg.line("grid strong", (LEFT, self.y(tick)), (WIDTH - RIGHT, self.y(tick)));
            svg.text("tick end", LEFT - 8.0, self.y(tick) + 4.0, &count(tick as u64));
            tick += self.step;
        }
    }
}

/// Durations of 1, 2 and 5 times each power of ten, with the factor.
fn log_ticks() -> impl Iterator<Item = (u64, u64)> {
    (0..12u32).flat_map(|decade| [1, 2, 5].map(|factor| (10u64.pow(decade) * factor, factor)))
}

/// Logarithmic scale of durations.
struct Log {
    low: f64,
    high: f64,
    top: f64,
    bottom: f64,
}

impl Log {
    fn new(low_ns: u64, high_ns: u64, top: f64, bottom: f64) -> Log {
        let low = (low_ns.max(1) as f64).log10();
        let high = (high_ns.max(low_ns + 1) as f64).log10();
        // At least one and a half decades, since noise would fill a smaller plot.
        Log { low: low - 0.12, high: (high + 0.12).max(low + 1.5), top, bottom }
    }

    fn y(&self, ns: u64) -> f64 {
        let share = ((ns.max(1) as f64).log10() - self.low) / (self.high - self.low);
        self.bottom - share.clamp(0.0, 1.0) * (self.bottom - self.top)
    }

    /// Draws grid lines and their texts; a low plot has them only at decades.
    fn axis(&self, svg: &mut Svg, only_decades: bool) {
        for (ns, factor) in log_ticks().filter(|(_, factor)| *factor == 1 || !only_decades) {
            let place = (ns as f64).log10();
            if place < self.low || place > self.high {
                continue;
            }
            let y = self.y(ns);
            svg.line(if factor == 1 { "grid strong" } else { "grid" }, (LEFT, y), (WIDTH - RIGHT, y));
            if factor == 1 || self.high - self.low < 2.6 {
                svg.text("tick end", LEFT - 8.0, y + 4.0, &time(ns));
            }
        }
    }
}

/// Draws latency over time: single requests coloured by the version of the code, p50, p99 and maximum of each bucket.
pub(super) fn latency(report: &Report) -> String {
    let series = &report.series;
    let named = !report.operations.is_empty();
    let top = if named { NAMES_HEIGHT + STRIP_HEIGHT + 6.0 } else { STRIP_HEIGHT + 12.0 };
    let bottom = top + 360.0;
    let mut svg =
        Svg::new(bottom + 28.0, &format!("latency over time, coloured by {}", report.subject().coloured_by()));
    let time_axis = TimeAxis::of(series);
    let low = series.buckets.iter().filter(|b| b.right + b.failed > 0).map(|b| b.p50_ns).min().unwrap_or(1);
    let low = low.min(series.dots.iter().map(|dot| dot.latency_ns).min().unwrap_or(low));
    let log = Log::new(low, report.summary.latency.max_ns, top, bottom);
    time_axis.axis(&mut svg, top, bottom);
    log.axis(&mut svg, false);
    operations(&mut svg, report, &time_axis, top, bottom);
    strip(&mut svg, report, &time_axis, top - STRIP_HEIGHT - 2.0);
    dots(&mut svg, series, &time_axis, &log);
    let line = |svg: &mut Svg, class, value: fn(&Bucket) -> u64| {
        let points = series.buckets.iter().enumerate().map(|(number, bucket)| {
            let t_ns = series.from_ns + number as u64 * series.bucket_ns + series.bucket_ns / 2;
            (bucket.right + bucket.failed > 0).then(|| (time_axis.x(t_ns), log.y(value(bucket))))
        });
        svg.polyline(class, points);
    };
    line(&mut svg, "line max", |bucket| bucket.max_ns);
    line(&mut svg, "line p99", |bucket| bucket.p99_ns);
    line(&mut svg, "line p50", |bucket| bucket.p50_ns);
    failures(&mut svg, series, &time_axis, &log);
    svg.finish()
}

/// Draws one path for all requests of a version: a file with thousands of circles would be slow to display.
fn dots(svg: &mut Svg, series: &Series, time_axis: &TimeAxis, log: &Log) {
    for version in 0..series.versions.len() {
        let mut path = String::new();
        for dot in series.dots.iter().filter(|dot| dot.version == version && !dot.failed) {
            let _ = write!(path, "M{:.1} {:.1}h0", time_axis.x(dot.t_ns), log.y(dot.latency_ns));
        }
        draw!(svg, r#"<path class="dot v{version}" d="{path}"/>"#);
    }
}

fn failures(svg: &mut Svg, series: &Series, time_axis: &TimeAxis, log: &Log) {
    for dot in series.dots.iter().filter(|dot| dot.failed) {
        let (x, y) = (time_axis.x(dot.t_ns), log.y(dot.latency_ns));
        draw!(svg, r#"<path class="cross" d="M{:.1} {:.1}l8 8m-8 0l8 -8"/>"#, x - 4.0, y - 4.0);
    }
}

/// Draws the version of the code as a coloured bar with the number of active patches; for a migration the server.
fn strip(svg: &mut Svg, report: &Report, time_axis: &TimeAxis, y: f64) {
    let (series, at_first) = (&report.series, report.subject().at_first());
    let end = series.from_ns + series.bucket_ns * series.buckets.len() as u64;
    for (number, &(from, version)) in series.changes.iter().enumerate() {
        let to = series.changes.get(number + 1).map_or(end, |next| next.0).min(end);
        let (x1, x2) = (time_axis.x(from), time_axis.x(to));
        if x2 <= x1 {
            continue;
        }
        let names = &series.versions[version];
        let title = if names.is_empty() { at_first.to_owned() } else { names.join(", ") };
        let short = if report.subject() == Subject::Code { names.len().to_string() } else { title.clone() };
        svg.rect(&format!("fill v{version}"), (x1, y), (x2 - x1, STRIP_HEIGHT - 4.0), &title);
        let max_chars = ((x2 - x1 - 3.0) / STRIP_CHAR_WIDTH) as usize;
        if max_chars >= short.chars().count().min(STRIP_CHARS_MIN) {
            svg.text("strip mid", (x1 + x2) / 2.0, y + STRIP_HEIGHT - 7.0, &shortened(&short, max_chars));
        }
    }
    svg.text("tick end", LEFT - 8.0, y + STRIP_HEIGHT - 7.0, report.subject().strip());
}

/// Draws a band from the start to the end of each operation, with its name above.
fn operations(svg: &mut Svg, report: &Report, time_axis: &TimeAxis, top: f64, bottom: f64) {
    let all_named = report.operations.len() <= NAMES_MAX;
    let name_y = top - STRIP_HEIGHT - 8.0;
    // A name that would overlap its neighbour moves to the right and keeps a line to its mark.
    let mut free_x = LEFT;
    for (number, op) in report.operations.iter().enumerate() {
        let op = &op.operation;
        let x1 = band(svg, op, time_axis, (top, bottom), &format!("{} {}", number + 1, op.label()));
        let x = x1.max(free_x);
        free_x = x + 15.0;
        svg.line("lead", (x1, top - STRIP_HEIGHT), (x, name_y));
        if all_named && x <= WIDTH - RIGHT {
            let text = escape(&shortened(&format!("{} {}", number + 1, short(op)), NAME_CHARS_MAX));
            draw!(
                svg,
                r#"<text class="name" transform="translate({:.1} {:.1}) rotate(-42)">{text}</text>"#,
                x + 3.0,
                name_y - 2.0
            );
        }
    }
}

/// Draws a band from the start to the end of an operation; returns its start.
fn band(svg: &mut Svg, op: &Operation, time_axis: &TimeAxis, (top, bottom): (f64, f64), title: &str) -> f64 {
    let (x1, x2) = (time_axis.x(op.started_ns), time_axis.x(op.ended_ns));
    let class = if op.operation == "revert" { "mark revert" } else { "mark" };
    svg.rect(class, (x1, top), ((x2 - x1).max(1.2), bottom - top), title);
    x1
}

/// Short name of an operation for a plot.
fn short(op: &Operation) -> String {
    match (op.operation.as_str(), &op.ending, op.patches.as_slice()) {
        ("apply", Ending::Committed, [name]) => format!("+ {name}"),
        ("revert", Ending::Committed, [name]) => format!("− {name}"),
        (_, Ending::FellBack { .. }, _) => format!("{} fell back", op.operation),
        (operation, _, [_, _, ..]) => format!("{operation} {} patches", op.patches.len()),
        _ => op.label(),
    }
}

/// Shortens a text to `room` characters, the last of them an ellipsis if characters are missing.
fn shortened(text: &str, max_chars: usize) -> String {
    if text.chars().count() <= max_chars {
        return text.to_owned();
    }
    text.chars().take(max_chars.saturating_sub(1)).chain(['…']).collect()
}

/// Draws right answers per second, and failures.
pub(super) fn throughput(report: &Report) -> String {
    let series = &report.series;
    let (top, bottom) = (10.0, 150.0);
    let mut svg = Svg::new(bottom + 28.0, "throughput over time");
    let time_axis = TimeAxis::of(series);
    let second = 1e9 / series.bucket_ns as f64;
    let rates: Vec<f64> = series.buckets.iter().map(|bucket| bucket.right as f64 * second).collect();
    let most = rates.iter().copied().fold(1.0, f64::max);
    let scale = Linear::new(most, nice_step(most / 3.5), top, bottom);
    let y = |rate: f64| scale.y(rate);
    time_axis.axis(&mut svg, top, bottom);
    scale.axis(&mut svg);
    operation_bands(&mut svg, report, &time_axis, top, bottom);
    let x = |number: usize| time_axis.x(series.from_ns + number as u64 * series.bucket_ns);
    let mut area = format!("M{:.1} {bottom:.1}", x(0));
    for (number, rate) in rates.iter().enumerate() {
        let _ = write!(area, "L{:.1} {2:.1}L{:.1} {2:.1}", x(number), x(number + 1), y(*rate));
    }
    let _ = write!(area, "L{:.1} {bottom:.1}Z", x(rates.len()));
    draw!(svg, r#"<path class="area" d="{area}"/>"#);
    for (number, bucket) in series.buckets.iter().enumerate().filter(|(_, bucket)| bucket.failed > 0) {
        let height = (bottom - y(bucket.failed as f64 * second)).clamp(3.0, bottom - top);
        let (x, width) = (x(number), (x(number + 1) - x(number)).max(2.0));
        svg.rect("bad", (x, bottom - height), (width, height), &format!("{} failed", bucket.failed));
    }
    svg.finish()
}

fn operation_bands(svg: &mut Svg, report: &Report, time_axis: &TimeAxis, top: f64, bottom: f64) {
    for op in &report.operations {
        band(svg, &op.operation, time_axis, (top, bottom), &op.operation.label());
    }
}

/// Draws the lateness of the load generator itself.
pub(super) fn lateness(report: &Report) -> String {
    let series = &report.series;
    let (top, bottom) = (8.0, 96.0);
    let mut svg = Svg::new(bottom + 28.0, "lateness of the load generator over time");
    let time_axis = TimeAxis::of(series);
    let most = series.buckets.iter().map(|bucket| bucket.late_max_ns).max().unwrap_or(0);
    let log = Log::new(10_000, most.max(1_000_000), top, bottom);
    time_axis.axis(&mut svg, top, bottom);
    log.axis(&mut svg, true);
    operation_bands(&mut svg, report, &time_axis, top, bottom);
    let mut path = String::new();
    for (number, bucket) in series.buckets.iter().enumerate().filter(|(_, bucket)| bucket.late_max_ns > 0) {
        let x = time_axis.x(series.from_ns + number as u64 * series.bucket_ns + series.bucket_ns / 2);
        let _ = write!(path, "M{x:.1} {bottom:.1}V{:.1}", log.y(bucket.late_max_ns));
    }
    draw!(svg, r#"<path class="late" d="{path}"/>"#);
    svg.finish()
}

/// Draws the times for which threads were stopped: a histogram with eight bars per decade.
pub(super) fn stops(report: &Report) -> Option<String> {
    const PER_DECADE: f64 = 8.0;
    let all: Vec<u64> =
        report.operations.iter().flat_map(|op| op.operation.stops.iter().map(|stop| stop.stopped_ns.max(1))).collect();
    let (&least, &most) = (all.iter().min()?, all.iter().max()?);
    let slot = |ns: u64| ((ns as f64).log10() * PER_DECADE).floor() as i64;
    // Some space on both sides.
    let (first, last) = (slot(least) - 2, slot(most) + 2);
    let mut counts = vec![0u64; (last - first + 1) as usize];
    all.iter().for_each(|&ns| counts[(slot(ns) - first) as usize] += 1);

    let (top, bottom) = (24.0, 190.0);
    let mut svg = Svg::new(bottom + 30.0, "how long threads were stopped");
    let high = counts.iter().copied().max().unwrap_or(1) as f64;
    let scale = Linear::new(high, nice_step((high / 3.5).max(1.0)), top, bottom);
    let x = |place: f64| LEFT + (place - first as f64) / counts.len() as f64 * (WIDTH - LEFT - RIGHT);
    scale.axis(&mut svg);
    for (ns, _) in log_ticks() {
        let place = (ns as f64).log10() * PER_DECADE;
        if place >= first as f64 && place <= (last + 1) as f64 {
            svg.line("grid", (x(place), top), (x(place), bottom));
            svg.text("tick mid", x(place), bottom + 18.0, &time(ns));
        }
    }
    for (number, &n) in counts.iter().enumerate().filter(|&(_, &n)| n > 0) {
        let place = (first + number as i64) as f64;
        let (x1, width) = (x(place) + 1.0, x(place + 1.0) - x(place) - 2.0);
        let y = scale.y(n as f64);
        svg.rect("bar", (x1, y), (width, bottom - y), &n.to_string());
    }
    for (name, ns) in [("median", report.stop.p50_ns), ("p99", report.stop.p99_ns)] {
        let at = x((ns.max(1) as f64).log10() * PER_DECADE);
        svg.line("quantile", (at, top - 6.0), (at, bottom));
        svg.text("name mid", at, top - 10.0, &format!("{name} {}", time(ns)));
    }
    Some(svg.finish())
}
