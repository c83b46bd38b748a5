//! The proxy alone, without the rest of `stillpoint`: for measurements and first trials.

fn main() {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: serve CONFIG.toml");
        std::process::exit(2);
    };
    if let Err(error) = stillpoint_migrate_proxy::run(path.as_ref(), |_| println!("serving")) {
        eprintln!("error: {error}: {}", std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default());
        std::process::exit(1);
    }
}
