//! Drawing of points and lines, as self-contained SVG.
//!
//! Written by hand: `plotters` 0.3 (four crates) has a type of its own for each pair of linear and logarithmic axes.

use std::fmt::Write as _;

/// Layout of values in one direction.
pub struct Axis {
    /// Name of the values, with the unit.
    pub label: &'static str,
    /// True for a logarithmic scale; values without a logarithm are left out.
    pub logarithmic: bool,
}

/// Values of one kind.
pub struct Curve {
    /// Name for the legend.
    pub name: String,
    /// Points in the order in which a line joins them; one that cannot be placed (not a number) interrupts the line.
    pub points: Vec<(f64, f64)>,
    /// True if a line joins them.
    pub joined: bool,
}

/// Drawing with two axes.
pub struct Figure {
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Curves to draw.
    pub curves: Vec<Curve>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 52.0;
const COLOURS: [&str; 6] = ["#0b6e99", "#c4501b", "#3d7d3d", "#7b4ea3", "#8a6d00", "#555555"];

/// Values of one axis, between its ends.
struct Scale {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Scale {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>) -> Scale {
        let place = |value: f64| if axis.logarithmic { value.log10() } else { value };
        let values: Vec<f64> = values.map(place).filter(|value| value.is_finite()).collect();
        let (from, to) = values.iter().fold((f64::MAX, f64::MIN), |(a, b), &v| (a.min(v), b.max(v)));
        let (from, to) = match axis.logarithmic {
            _ if values.is_empty() => (0.0, 1.0),
            true => (from.floor(), to.ceil().max(from.floor() + 1.0)),
            false => (from.min(0.0), if to > 0.0 { to * 1.05 } else { 1.0 }),
        };
        Scale { from, to, logarithmic: axis.logarithmic }
    }

    /// Position from 0 to 1; `None` for a value that cannot be placed.
    fn position(&self, value: f64) -> Option<f64> {
        let value = if self.logarithmic { value.log10() } else { value };
        value.is_finite().then(|| (value - self.from) / (self.to - self.from))
    }

    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            return (self.from as i32..=self.to as i32).map(|power| 10f64.powi(power)).collect();
        }
        let rough = (self.to - self.from) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (self.from / step).ceil() as i32;
        (first..).map(|i| f64::from(i) * step).take_while(|value| *value <= self.to).collect()
    }
}

impl Figure {
    /// Returns the whole file.
    pub fn svg(&self) -> String {
        let points = || self.curves.iter().flat_map(|curve| curve.points.iter());
        let (x, y) = (Scale::of(&self.x, points().map(|p| p.0)), Scale::of(&self.y, points().map(|p| p.1)));
        let across = |value: f64| x.position(value).map(|at| LEFT + at * (WIDTH - LEFT - RIGHT));
        let up = |value: f64| y.position(value).map(|at| HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM));
        let mut out = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>"#
        );
        // Writing to a string cannot fail.
        for tick in x.ticks() {
            let Some(at) = across(tick) else { continue };
            let (low, text) = (HEIGHT - BOTTOM, HEIGHT - BOTTOM + 16.0);
            let _ = write!(out, r##"<path d="M{at:.1} {TOP}V{low}" stroke="#ddd"/>"##);
            let _ = write!(out, r#"<text x="{at:.1}" y="{text}" text-anchor="middle">{}</text>"#, short(tick));
        }
        for tick in y.ticks() {
            let Some(at) = up(tick) else { continue };
            let _ = write!(out, r##"<path d="M{LEFT} {at:.1}H{:.1}" stroke="#ddd"/>"##, WIDTH - RIGHT);
            let _ = write!(
                out,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                LEFT - 6.0,
                at + 4.0,
                short(tick)
            );
        }
        for (i, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let place = |&(a, b): &(f64, f64)| across(a).zip(up(b));
            let places: Vec<Option<(f64, f64)>> = curve.points.iter().map(place).collect();
            for line in places.split(Option::is_none).filter(|line| curve.joined && line.len() > 1) {
                let path: Vec<String> = line.iter().flatten().map(|(a, b)| format!("{a:.1} {b:.1}")).collect();
                let _ = write!(out, r#"<path d="M{}" fill="none" stroke="{colour}"/>"#, path.join("L"));
            }
            for (a, b) in places.into_iter().flatten() {
                let _ = write!(out, r#"<circle cx="{a:.1}" cy="{b:.1}" r="2.5" fill="{colour}"/>"#);
            }
            let (at, row) = (WIDTH - RIGHT + 14.0, TOP + 14.0 + 18.0 * i as f64);
            let _ = write!(out, r#"<circle cx="{at}" cy="{:.1}" r="4" fill="{colour}"/>"#, row - 4.0);
            let _ = write!(out, r#"<text x="{}" y="{row}">{}</text>"#, at + 10.0, escape(&curve.name));
        }
        let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
        let _ = write!(
            out,
            r#"<text x="{middle}" y="{}" text-anchor="middle">{}</text>"#,
            HEIGHT - 12.0,
            escape(self.x.label)
        );
        let half = HEIGHT / 2.0;
        let _ = write!(
            out,
            r#"<text x="16" y="{half}" text-anchor="middle" transform="rotate(-90 16 {half})">{}</text>"#,
            escape(self.y.label)
        );
        out + "</svg>\n"
    }
}

fn short(value: f64) -> String {
    if value >= 0.001 || value == 0.0 { value.to_string() } else { format!("{value:e}") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_placed_is_left_out() {
        let axis = |logarithmic| Axis { label: "a < b", logarithmic };
        let curve = Curve { name: "one & other".into(), points: vec![(1.0, 0.0), (2.0, 10.0)], joined: true };
        let svg = Figure { x: axis(false), y: axis(true), curves: vec![curve] }.svg();
        assert_eq!(svg.matches(r#"r="2.5""#).count(), 1, "zero has no logarithm: {svg}");
        assert!(svg.contains("one &amp; other") && svg.contains("a &lt; b"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_line_is_parted_where_there_is_no_number() {
        let axis = || Axis { label: "", logarithmic: false };
        let points = vec![(-1.0, 1.0), (2.0, 1.0), (f64::NAN, f64::NAN), (3.0, 2.0), (4.0, 2.0)];
        let svg = Figure { x: axis(), y: axis(), curves: vec![Curve { name: "".into(), points, joined: true }] }.svg();
        assert_eq!(svg.matches(r#"fill="none""#).count(), 2, "{svg}");
        assert!(!svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn nothing_can_be_drawn() {
        let axis = || Axis { label: "", logarithmic: true };
        assert!(Figure { x: axis(), y: axis(), curves: Vec::new() }.svg().ends_with("</svg>\n"));
    }
}
