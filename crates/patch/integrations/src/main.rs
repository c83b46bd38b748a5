//! `stillpoint-integrations INTEGRATION PRISTINE TREE`: changes TREE, a copy of PRISTINE, to the state of the integration (setup/generations, setup/bochs).

use std::path::Path;
use std::process::ExitCode;
use stillpoint_integrations::{Applied, Error, Integration};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [integration, pristine, tree] = &arguments[..] else {
        eprintln!("usage: stillpoint-integrations INTEGRATION PRISTINE TREE");
        return ExitCode::from(2);
    };
    match run(Path::new(integration), Path::new(pristine), Path::new(tree)) {
        Ok(Applied { files, written }) => {
            println!("{} files differ from the shipped ones, {} written", files.len(), written.len());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(integration: &Path, pristine: &Path, tree: &Path) -> Result<Applied, Error> {
    Integration::read(integration)?.apply(pristine, tree)
}
