//! Groups of bars as SVG, on a scale of powers of ten.

use std::fmt::Write;

const HEIGHT: f64 = 320.0;
const TOP: f64 = 40.0;
const LEFT: f64 = 60.0;
const BAR: f64 = 16.0;
const GAP: f64 = 28.0;
const COLOURS: [&str; 6] = ["#888888", "#5b8db8", "#c98b3c", "#6aa84f", "#a64d79", "#45818e"];

/// Bars that are drawn side by side.
pub(crate) struct Group {
    pub(crate) name: String,
    /// Names, the same in each group, and values.
    pub(crate) bars: Vec<(&'static str, f64)>,
}

/// Draws the chart.
pub(crate) fn draw(groups: &[Group]) -> String {
    let values = || groups.iter().flat_map(|group| &group.bars).map(|(_, value)| value.max(1e-3));
    let least = values().fold(f64::INFINITY, f64::min).log10().floor();
    let most = values().fold(1e-3, f64::max).log10().ceil().max(least + 1.0);
    let y = |value: f64| TOP + HEIGHT * (1.0 - (value.max(1e-3).log10() - least) / (most - least));
    let count = groups.first().map_or(0, |group| group.bars.len());
    let width_of_group = BAR * count as f64 + GAP;
    let (width, height) = (LEFT + width_of_group * groups.len() as f64 + GAP, TOP + HEIGHT + 40.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"4\" y=\"14\">seconds</text>\n"
    );
    // A write to a string cannot fail.
    let mut power = least;
    while power <= most {
        let at = y(10f64.powf(power));
        let _ = writeln!(svg, "<path d=\"M{LEFT} {at:.1}H{width:.0}\" stroke=\"#dddddd\"/>");
        let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{}</text>", at + 4.0, 10f64.powf(power));
        power += 1.0;
    }
    for (number, group) in groups.iter().enumerate() {
        let left = LEFT + GAP / 2.0 + width_of_group * number as f64;
        for (place, ((_, value), colour)) in group.bars.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let (x, top) = (left + BAR * place as f64, y(*value));
            let tall = (TOP + HEIGHT - top).max(0.5);
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{colour}\"/>",
                BAR - 2.0
            );
        }
        let _ = writeln!(svg, "<text x=\"{left:.1}\" y=\"{:.1}\">{}</text>", TOP + HEIGHT + 18.0, group.name);
    }
    for (place, ((name, _), colour)) in
        groups.iter().take(1).flat_map(|group| &group.bars).zip(COLOURS.iter().cycle()).enumerate()
    {
        let x = LEFT + 80.0 * place as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"6\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"15\">{name}</text>",
            x + 14.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}
