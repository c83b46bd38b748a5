//! Results: raw numbers as JSON, and the tables that docs/numbers.md quotes.

use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use stillpoint_patch_bench::machine::machine;
use stillpoint_testing::figure::Figure;

/// One section: a table for people and the raw numbers behind it.
pub(crate) struct Section {
    /// Key in the JSON file.
    pub(crate) key: &'static str,
    /// Heading.
    pub(crate) title: String,
    /// Column names.
    pub(crate) columns: Vec<&'static str>,
    /// Rows of text.
    pub(crate) rows: Vec<Vec<String>>,
    /// One line each, below the table.
    pub(crate) notes: Vec<String>,
    /// Raw numbers of all measurements.
    pub(crate) raw: Value,
    /// Drawings, each with the suffix that distinguishes it from others.
    pub(crate) figures: Vec<(&'static str, Figure)>,
}

impl Section {
    /// A section without rows.
    pub(crate) fn new(key: &'static str, title: impl Into<String>, columns: &[&'static str]) -> Section {
        let (title, columns) = (title.into(), columns.to_vec());
        Section { key, title, columns, rows: Vec::new(), notes: Vec::new(), raw: Value::Null, figures: Vec::new() }
    }

    /// Sets the raw numbers.
    pub(crate) fn raw(&mut self, raw: &impl Serialize) {
        self.raw = serde_json::to_value(raw).expect("numbers and texts serialise");
    }

    /// Returns the section as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("### {}\n\n", self.title);
        if !self.rows.is_empty() {
            let line =
                |cells: &mut dyn Iterator<Item = &str>| format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
            text += &line(&mut self.columns.iter().copied());
            text += &line(&mut self.columns.iter().map(|_| "---"));
            self.rows.iter().for_each(|row| text += &line(&mut row.iter().map(String::as_str)));
            text.push('\n');
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}\n");
        }
        text
    }
}

/// All sections of one run.
pub(crate) struct Results {
    dir: PathBuf,
    stem: String,
    machine: String,
    command: String,
    sections: Vec<Section>,
}

impl Results {
    /// Makes results of `command` in `dir`, under this name or the date.
    pub(crate) fn new(dir: &Path, name: Option<&str>, command: &str) -> Results {
        let dated = || format!("bench-{}", output("date", &["-u", "+%Y-%m-%d-%H%M"]));
        Results {
            dir: dir.to_owned(),
            stem: name.map_or_else(dated, str::to_owned),
            machine: machine(),
            command: command.to_owned(),
            sections: Vec::new(),
        }
    }

    /// Adds a section, prints it, and rewrites the files, so that an interrupted run keeps its results.
    pub(crate) fn add(&mut self, section: Section) -> std::io::Result<()> {
        println!("\n{}", section.markdown());
        std::fs::create_dir_all(&self.dir)?;
        for (part, figure) in &section.figures {
            let parts = [self.stem.as_str(), section.key, part];
            // Named after the experiment if there is one, not after its only section.
            let named = !self.stem.starts_with("bench-");
            let used = parts.iter().enumerate().filter(|(i, part)| !(part.is_empty() || named && *i == 1));
            let name = used.map(|(_, part)| *part).collect::<Vec<_>>().join("-");
            std::fs::write(self.dir.join(format!("{name}.svg")), figure.svg())?;
        }
        self.sections.push(section);
        std::fs::write(self.dir.join(format!("{}.json", self.stem)), self.json())?;
        std::fs::write(self.dir.join(format!("{}.md", self.stem)), self.markdown())
    }

    /// Returns the path of the file with the tables.
    pub(crate) fn tables(&self) -> PathBuf {
        self.dir.join(format!("{}.md", self.stem))
    }

    fn json(&self) -> String {
        let mut all = Map::new();
        all.insert("command".into(), self.command.clone().into());
        all.insert("machine".into(), self.machine.clone().into());
        all.extend(self.sections.iter().map(|section| (section.key.to_owned(), section.raw.clone())));
        serde_json::to_string_pretty(&all).expect("values serialise") + "\n"
    }

    fn markdown(&self) -> String {
        let head = format!("Measured by `{}` on {}.\n\n", self.command, self.machine);
        self.sections.iter().fold(head, |text, section| text + &section.markdown())
    }
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

/// Formats a number with a suitable number of digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
