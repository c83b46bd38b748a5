//! `stillpoint patch target`: fetches the program that a patch is for, as its package builds it or as the archive has it.

use super::build::{parse_package, parse_shipped};
use super::building::{Integration, Workplace, hint, with_builder};
use super::running::{RunningTarget, SELECTING};
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use stillpoint_patch_builder::{Diff, Error, Parts, Shipped, ShippedAs};

/// Arguments of `stillpoint patch target`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("origin").required(true).args(["debian"]).args(SELECTING))]
pub(crate) struct Args {
    /// Source package. Default version: the newest one that the archive serves.
    #[arg(long, value_name = "PACKAGE[=VERSION]")]
    debian: Option<String>,
    #[command(flatten)]
    running: RunningTarget,
    /// Diffs of the series to build it with: `full`, `without-cves` or `without:NAME[,NAME...]`.
    #[arg(long, value_name = "WHAT", default_value = "full")]
    shipped: String,
    /// Fetch the binary of the archive instead of building one.
    #[arg(long, conflicts_with_all = ["shipped", "integration"])]
    prebuilt: bool,
    /// Name of the program, or the name by which programs load the library; without it, only the series is listed.
    #[arg(long, value_name = "NAME", requires = "output")]
    program: Option<String>,
    /// Directory for the program.
    #[arg(short, long, value_name = "DIR", requires = "program")]
    output: Option<PathBuf>,
    /// Build the package with these diffs at a lower version, and write its source and binary packages to this directory:
    /// for a machine that is to run it, and for `--sources`.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["prebuilt", "program", "integration"])]
    packages: Option<PathBuf>,
    #[command(flatten)]
    integration: Integration,
    #[command(flatten)]
    workplace: Workplace,
}

/// Runs `stillpoint patch target`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    let ShippedAs::Series(shipped) = parse_shipped(&args.shipped) else {
        return Err(Failure::usage(
            "--shipped takes `full`, `without-cves` or `without:NAME`; the version goes to --debian",
        ));
    };
    let selected = args.running.selected()?;
    let (package, version, series, program, packages) = with_builder(&args.workplace, output, |mut builder| {
        let (package, version) = match (&selected, &args.debian) {
            (Some(selected), _) => {
                let program = args.running.program(selected, &builder)?;
                builder = builder.of_program(&program)?;
                let running = builder.package_of(&program)?;
                (running.source, Some(running.source_version))
            }
            (None, package) => parse_package(package.as_deref().unwrap_or_default()),
        };
        let parts = if args.prebuilt { Parts::SourceAndBinaries } else { Parts::Source };
        let source = builder.fetch_source(&package, version.as_deref(), parts)?;
        let there = shipped.diffs(&source.series)?;
        let program = match (&args.program, &args.output) {
            (Some(name), Some(into)) if args.prebuilt => Some(builder.take_binary(&source, name, into)?),
            (Some(name), Some(into)) => {
                let built = builder.build_package(&source, &shipped, args.integration.integrated().as_ref())?;
                Some(builder.strip(&built, name, into)?)
            }
            _ => None,
        };
        let packages = args.packages.as_deref();
        let packages = packages.map(|into| builder.write_older_packages(&source, &shipped, into)).transpose()?;
        let series: Vec<(Diff, bool)> = source.series.diffs.iter().map(|d| (d.clone(), there.contains(d))).collect();
        Ok((source.name().to_owned(), source.version().to_owned(), series, program, packages))
    })
    .map_err(|error| {
        let hint = match &error {
            Error::Target(_) => Some("--program with a name of this list".to_owned()),
            error => hint(error, None),
        };
        let state = "no program was written";
        let failure = if error.is_refusal() { Failure::refused(error) } else { Failure::failed(error, state) };
        Failure { hint, state: state.to_owned(), ..failure }
    })?;
    output.line(format_args!("{package} {version}"));
    let mut entries = Vec::new();
    for (Diff { name, cves, subject, .. }, shipped) in &series {
        let mark = if *shipped { "in" } else { "out" };
        output.line(format_args!("  {mark:3}  {name}  {}", cves.join(" ")));
        entries.push(json!({"name": name, "cves": cves, "subject": subject, "shipped": shipped}));
    }
    let program = program.map(|path| path.display().to_string());
    if let Some(path) = &program {
        let how = if args.prebuilt { "from the archive" } else { built_with(&shipped) };
        output.line(format_args!("{path} ({how})"));
    }
    let written: Vec<String> = packages.iter().flat_map(|p| &p.files).map(|path| path.display().to_string()).collect();
    if let Some(packages) = &packages {
        output.line(format_args!("{} {} ({})", package, packages.version, built_with(&shipped)));
        written.iter().for_each(|path| output.line(format_args!("  {path}")));
    }
    let built_version = packages.as_ref().map(|packages| &packages.version);
    output.result(
        "target",
        &json!({"package": package, "version": version, "series": entries, "program": program,
            "built-version": built_version, "packages": written}),
    );
    Ok(())
}

fn built_with(shipped: &Shipped) -> &'static str {
    match shipped {
        Shipped::Full => "built with its full series",
        Shipped::WithoutCves => "built without its CVE fixes",
        Shipped::Without(_) => "built without some of its series",
    }
}
