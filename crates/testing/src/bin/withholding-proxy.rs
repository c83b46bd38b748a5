//! A proxy for HTTP that withholds the newest version of each Debian package: the tests, the builder and the setup must
//! then use the version before it.
//!
//! `withholding-proxy [PORT [NAME_VERSION...]]` prints its URL for `http_proxy`, and serves until it is ended. Without
//! names it withholds the newest version of each package that this machine's lists name in more than one.

use std::io::Write;
use stillpoint_testing::withholding::{Proxy, Withheld};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(why) = serve(&arguments) {
        eprintln!("error: {why}");
        std::process::exit(1);
    }
}

fn serve(arguments: &[String]) -> Result<(), String> {
    let (port, names) = arguments.split_first().map_or(("0", &[][..]), |(port, names)| (port.as_str(), names));
    let port = port.parse().map_err(|_| format!("port {port:?}: usage: withholding-proxy [PORT [NAME_VERSION...]]"))?;
    let withheld = match names {
        [] => Withheld::newest_listed(None)?,
        names => Withheld::of(names.iter().map(String::as_str)),
    };
    let proxy = Proxy::start(port).map_err(|e| format!("listen on port {port}: {e}"))?;
    eprintln!("{} names and versions are withheld", withheld.count());
    proxy.withhold(move |file| withheld.covers(file));
    println!("{}", proxy.url());
    std::io::stdout().flush().map_err(|e| format!("print the URL: {e}"))?;
    loop {
        std::thread::park();
    }
}
