//! Lines over time or load as SVG, one panel below the other.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 180.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 34.0;
const BELOW: f64 = 40.0;
const COLOURS: [&str; 6] = ["#5b8db8", "#c94f3c", "#6aa84f", "#c98b3c", "#a64d79", "#444444"];

/// One plot.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) across: &'static str,
    /// Names and points.
    pub(crate) lines: Vec<(String, Vec<(f64, f64)>)>,
    /// Marked stretch: the migration.
    pub(crate) marked: Option<(f64, f64)>,
}

/// Draws the panels.
pub(crate) fn draw(panels: &[Panel]) -> String {
    let tall = (TOP + HEIGHT + BELOW) * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {tall:.0}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        LEFT + WIDTH + 20.0
    );
    for (number, panel) in panels.iter().enumerate() {
        draw_panel(&mut svg, panel, (TOP + HEIGHT + BELOW) * number as f64 + TOP);
    }
    svg.push_str("</svg>\n");
    svg
}

/// The next round number, in steps that read well.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-3).log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|step| step * power).find(|round| *round >= value).unwrap_or(value)
}

// A write to a string cannot fail.
fn draw_panel(svg: &mut String, panel: &Panel, top: f64) {
    let points = || panel.lines.iter().flat_map(|(_, points)| points);
    let most_y = round_up(points().map(|(_, y)| *y).fold(0.0, f64::max));
    let most_x = points().map(|(x, _)| *x).fold(1e-3, f64::max);
    let place = |(x, y): (f64, f64)| (LEFT + WIDTH * x / most_x, top + HEIGHT * (1.0 - y / most_y));
    let _ = writeln!(svg, "<text x=\"4\" y=\"{:.0}\" font-weight=\"bold\">{}</text>", top - 18.0, panel.title);
    if let Some((from, to)) = panel.marked {
        let (left, right) = (place((from, 0.0)).0, place((to.min(most_x), 0.0)).0);
        let wide = (right - left).max(1.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{left:.1}\" y=\"{top:.0}\" width=\"{wide:.1}\" height=\"{HEIGHT}\" fill=\"#eeeeee\"/>"
        );
    }
    for step in 0..=4 {
        let (x, y) = (most_x * f64::from(step) / 4.0, most_y * f64::from(step) / 4.0);
        let ((across, _), (_, up)) = (place((x, 0.0)), place((0.0, y)));
        let _ = writeln!(svg, "<path d=\"M{LEFT} {up:.1}H{:.0}\" stroke=\"#dddddd\"/>", LEFT + WIDTH);
        let _ = writeln!(svg, "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{y}</text>", LEFT - 6.0, up + 4.0);
        let below = top + HEIGHT + 15.0;
        let _ = writeln!(svg, "<text x=\"{across:.1}\" y=\"{below:.0}\" text-anchor=\"middle\">{x:.0}</text>");
    }
    let (middle, below) = (LEFT + WIDTH / 2.0, top + HEIGHT + 28.0);
    let _ = writeln!(svg, "<text x=\"{middle:.0}\" y=\"{below:.0}\" text-anchor=\"middle\">{}</text>", panel.across);
    for (number, ((name, points), colour)) in panel.lines.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let path: Vec<String> =
            points.iter().map(|point| place(*point)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let path = path.join(" ");
        let _ = writeln!(svg, "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.4\"/>");
        let x = LEFT + 120.0 * number as f64;
        let _ =
            writeln!(svg, "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>", top - 14.0);
        let _ = writeln!(svg, "<text x=\"{:.0}\" y=\"{:.0}\">{name}</text>", x + 14.0, top - 5.0);
    }
}
