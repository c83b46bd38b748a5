//! Database of dpkg: the packages that own a file, its expected checksum, and diversions.
//!
//! The database may be that of a container, and is then written by others: it is read through a checked tree, each file up to a limit, and a
//! line of another form is left out.

use crate::deb822::stanzas;
use crate::{Error, is_package, is_version};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use stillpoint_host::file::bounded;
use stillpoint_host::untrusted::Tree;

/// Directory of the database, relative to the root.
const DIRECTORY: &str = "var/lib/dpkg";
/// Size limit of one file of the database, in bytes.
const FILE_MAX: u64 = 64 << 20;
/// Limit of all lists that are read in one search, in bytes.
const LISTS_MAX: u64 = 1 << 30;
/// Limit of installed packages.
const PACKAGES_MAX: usize = 200_000;
/// Directories of which the root has links into `/usr` on merged systems.
const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Installed binary package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Package {
    /// Name, for instance `libssl3`.
    pub name: String,
    /// Architecture, for instance `amd64` or `all`.
    pub architecture: String,
    /// Version; a rebuild has another one than its source.
    pub version: String,
    /// Name of the source package, for instance `openssl`.
    pub source: String,
    /// Version of the source package.
    pub source_version: String,
}

impl Package {
    /// Makes a package of the fields of its control file; `None` if a field is missing, or could be an option or a path.
    pub fn of_fields<'a>(field: impl Fn(&str) -> Option<&'a str>) -> Option<Package> {
        let (name, version, architecture) = (field("Package")?, field("Version")?, field("Architecture")?);
        // the source is named when it differs, its version in parentheses when that differs too
        let (source, source_version) = match field("Source") {
            None => (name, version),
            Some(source) => match source.split_once('(') {
                Some((name, rest)) => (name.trim(), rest.trim_end_matches(')').trim()),
                None => (source, version),
            },
        };
        let is_sound = is_package(name)
            && is_package(source)
            && is_version(version)
            && is_version(source_version)
            && architecture.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-');
        is_sound.then(|| Package {
            name: name.to_owned(),
            architecture: architecture.to_owned(),
            version: version.to_owned(),
            source: source.to_owned(),
            source_version: source_version.to_owned(),
        })
    }
}

/// File of a package that another package or an administrator has moved aside.
#[derive(Debug)]
struct Diversion {
    original: PathBuf,
    to: PathBuf,
    /// Package whose file has the original name; `None` for an administrator.
    by: Option<String>,
}

/// Database of one root file system.
#[derive(Debug)]
pub struct Database {
    root: Tree,
    packages: Vec<Package>,
    diversions: Vec<Diversion>,
    /// Directories that are links into `/usr`.
    merged: Vec<&'static str>,
    native: String,
}

impl Database {
    /// Reads the database of a root file system: `/`, or `/proc/PID/root`.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] if there is none; or it cannot be read.
    pub fn open(root: &Path) -> Result<Database, Error> {
        let tree = Tree::open(root)?.known_as(Path::new("/"));
        let status = match read(&tree, "status") {
            Err(Error::Host(error)) if error.is_not_found() => return Err(Error::NoDatabase(root.to_owned())),
            read => read?,
        };
        let text = String::from_utf8_lossy(&status);
        let mut packages: Vec<Package> = Vec::new();
        for stanza in stanzas(&text) {
            // `install ok installed`; files of a package that is unpacked and not configured are there as well
            let state = stanza.field("Status").and_then(|status| status.split_ascii_whitespace().nth(2));
            if state.is_some_and(|state| !["not-installed", "config-files"].contains(&state)) {
                packages.extend(Package::of_fields(|name| stanza.field(name)));
            }
        }
        if packages.len() > PACKAGES_MAX {
            return Err(Error::Malformed {
                what: "dpkg's status".into(),
                why: format!("it has {} packages", packages.len()),
            });
        }
        let diversions = match read(&tree, "diversions") {
            Err(Error::Host(error)) if error.is_not_found() => Vec::new(),
            read => diversions(&read?),
        };
        let is_merged = |name: &&str| {
            tree.link(name).is_ok_and(|to| to.strip_prefix("/").unwrap_or(&to) == Path::new("usr").join(name))
        };
        let merged = MERGED.into_iter().filter(is_merged).collect();
        let native = packages.iter().find(|package| package.name == "dpkg").map(|dpkg| dpkg.architecture.clone());
        Ok(Database { root: tree, packages, diversions, merged, native: native.unwrap_or_else(|| "amd64".into()) })
    }

    /// Root file system that it describes.
    pub fn root(&self) -> &Tree {
        &self.root
    }

    /// Architecture of packages that are named without one.
    pub fn native_architecture(&self) -> &str {
        &self.native
    }

    /// Installed packages, in the order of the database.
    pub fn packages(&self) -> &[Package] {
        &self.packages
    }

    /// Finds the packages that own files, by paths without links. A file that several packages have is owned by each of them; a file that
    /// was diverted belongs to the package that it was diverted from.
    ///
    /// # Errors
    /// A list of the database cannot be read, or all of them are too long.
    pub fn owners(&self, paths: &BTreeSet<PathBuf>) -> Result<BTreeMap<PathBuf, Vec<Owner<'_>>>, Error> {
        // Names that a list may have for a path, with the path and the rule for the package.
        let mut wanted: HashMap<Vec<u8>, Vec<(&PathBuf, Rule<'_>)>> = HashMap::new();
        for path in paths {
            let forms = self.forms(path);
            for name in &forms {
                let rule = match self.diversions.iter().find(|diversion| self.forms(&diversion.original).contains(name))
                {
                    Some(diversion) => Rule::Only(diversion.by.as_deref()),
                    None => Rule::Any,
                };
                wanted.entry(bytes_of(name)).or_default().push((path, rule));
            }
            for diversion in self.diversions.iter().filter(|diversion| forms.contains(&diversion.to)) {
                for original in self.forms(&diversion.original) {
                    wanted.entry(bytes_of(&original)).or_default().push((path, Rule::Besides(diversion.by.as_deref())));
                }
            }
        }
        let mut found: BTreeMap<PathBuf, Vec<Owner<'_>>> = BTreeMap::new();
        let mut total = 0u64;
        for package in &self.packages {
            let Some(list) = self.read_info(package, "list")? else { continue };
            total += list.len() as u64;
            if total > LISTS_MAX {
                return Err(Error::Malformed {
                    what: "dpkg's lists".into(),
                    why: format!("they have more than {LISTS_MAX} bytes"),
                });
            }
            for line in list.split(|byte| *byte == b'\n') {
                for (path, rule) in wanted.get(line).into_iter().flatten() {
                    let listed = PathBuf::from(OsStr::from_bytes(line));
                    if rule.allows(&package.name) {
                        found.entry((*path).clone()).or_default().push(Owner { package, listed });
                    }
                }
            }
        }
        Ok(found)
    }

    /// Returns the MD5 sum that a file has in its package; `None` for a package without sums.
    ///
    /// # Errors
    /// The sums cannot be read.
    pub fn checksum(&self, owner: &Owner<'_>) -> Result<Option<[u8; 16]>, Error> {
        let Some(sums) = self.read_info(owner.package, "md5sums")? else { return Ok(None) };
        let name = owner.listed.strip_prefix("/").unwrap_or(&owner.listed);
        for line in sums.split(|byte| *byte == b'\n') {
            let Some((sum, rest)) = line.split_at_checked(32) else { continue };
            if rest.strip_prefix(b"  ") == Some(name.as_os_str().as_bytes()) {
                let mut bytes = [0; 16];
                return Ok(hex::decode_to_slice(sum, &mut bytes).is_ok().then_some(bytes));
            }
        }
        Ok(None)
    }

    /// Names that a path has with and without the links of a merged `/usr`.
    fn forms(&self, path: &Path) -> Vec<PathBuf> {
        let mut forms = vec![path.to_owned()];
        for name in &self.merged {
            let (short, long) = (Path::new("/").join(name), Path::new("/usr").join(name));
            if let Ok(rest) = path.strip_prefix(&long) {
                forms.push(short.join(rest));
            } else if let Ok(rest) = path.strip_prefix(&short) {
                forms.push(long.join(rest));
            }
        }
        forms
    }

    /// Reads a file about a package: one of several architectures has its architecture in the name.
    fn read_info(&self, package: &Package, suffix: &str) -> Result<Option<Vec<u8>>, Error> {
        for name in [format!("{}:{}", package.name, package.architecture), package.name.clone()] {
            match read(&self.root, &format!("info/{name}.{suffix}")) {
                Err(Error::Host(error)) if error.is_not_found() => {}
                read => return read.map(Some),
            }
        }
        Ok(None)
    }
}

/// Package that owns a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner<'a> {
    /// The package.
    pub package: &'a Package,
    /// Name of the file in the package's list.
    pub listed: PathBuf,
}

/// Packages for which a name in a list stands for a path.
#[derive(Debug, Clone, Copy)]
enum Rule<'a> {
    Any,
    /// The package that diverts the others' file; none for an administrator.
    Only(Option<&'a str>),
    /// All but the package that diverts their file.
    Besides(Option<&'a str>),
}

impl Rule<'_> {
    fn allows(self, package: &str) -> bool {
        match self {
            Rule::Any => true,
            Rule::Only(by) => by == Some(package),
            Rule::Besides(by) => by != Some(package),
        }
    }
}

fn bytes_of(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn read(root: &Tree, name: &str) -> Result<Vec<u8>, Error> {
    let path = Path::new(DIRECTORY).join(name);
    Ok(bounded(&root.file(&path)?, &root.path().join(&path), FILE_MAX)?)
}

/// Parses triples of lines: the original name, the new one, the package.
fn diversions(text: &[u8]) -> Vec<Diversion> {
    let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    let path = |line: &[u8]| PathBuf::from(OsStr::from_bytes(line));
    let triples = lines.chunks_exact(3).map(|lines| {
        let by = std::str::from_utf8(lines[2]).ok()?;
        Some(Diversion { original: path(lines[0]), to: path(lines[1]), by: (by != ":").then(|| by.to_owned()) })
    });
    triples.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const STATUS: &str = "\
Package: dpkg
Status: install ok installed
Architecture: amd64
Version: 1.21

Package: libx1
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Source: x (2:1.0-1)
Version: 2:1.0-1+b4

Package: libx1
Status: hold ok installed
Architecture: i386
Source: x
Version: 2:1.0-2

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tool
Status: install ok unpacked
Architecture: amd64
Version: 3-1

Package: wrapper
Status: install ok installed
Architecture: all
Version: 4-1

Package: ../evil
Status: install ok installed
Architecture: amd64
Version: 1

Package: evil
Status: install ok installed
Architecture: amd64
Version: 1/../..
";

    fn root() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let info = dir.path().join("var/lib/dpkg/info");
        fs::create_dir_all(&info).unwrap();
        fs::create_dir_all(dir.path().join("usr/lib")).unwrap();
        symlink("usr/lib", dir.path().join("lib")).unwrap();
        let write = |name: &str, text: &str| fs::write(info.join(name), text).unwrap();
        fs::write(info.join("../status"), STATUS).unwrap();
        fs::write(
            info.join("../diversions"),
            "/usr/bin/x-config\n/usr/bin/x-config.tool\nwrapper\n/usr/bin/own\n/usr/bin/own.aside\n:\n",
        )
        .unwrap();
        write("libx1:amd64.list", "/.\n/lib\n/lib/x86_64-linux-gnu/libx.so.1.0\n");
        write("libx1:amd64.md5sums", "00112233445566778899aabbccddeeff  lib/x86_64-linux-gnu/libx.so.1.0\n");
        write("libx1:i386.list", "/lib/i386-linux-gnu/libx.so.1.0\n/usr/share/both\n");
        write("tool.list", "/usr/bin/x-config\n/usr/bin/own\n/usr/share/both\n");
        write("wrapper.list", "/usr/bin/x-config\n");
        write("gone.list", "/usr/share/both\n");
        dir
    }

    fn owners(database: &Database, path: &str) -> Vec<String> {
        let found = database.owners(&BTreeSet::from([path.into()])).unwrap();
        let name = |owner: &Owner<'_>| format!("{}:{}", owner.package.name, owner.package.architecture);
        found.values().flatten().map(name).collect()
    }

    #[test]
    fn a_file_is_found_by_either_name_of_a_merged_usr_and_by_architecture() {
        let dir = root();
        let database = Database::open(dir.path()).unwrap();
        for path in ["/lib/x86_64-linux-gnu/libx.so.1.0", "/usr/lib/x86_64-linux-gnu/libx.so.1.0"] {
            assert_eq!(owners(&database, path), ["libx1:amd64"], "{path}");
        }
        assert_eq!(owners(&database, "/usr/lib/i386-linux-gnu/libx.so.1.0"), ["libx1:i386"]);
        assert_eq!(owners(&database, "/usr/share/both"), ["libx1:i386", "tool:amd64"], "not that of a removed package");
        assert_eq!(owners(&database, "/usr/lib/other"), [""; 0]);
        fs::remove_file(dir.path().join("lib")).unwrap();
        let apart = Database::open(dir.path()).unwrap();
        assert_eq!(owners(&apart, "/usr/lib/x86_64-linux-gnu/libx.so.1.0"), [""; 0], "/lib is another directory");
    }

    #[test]
    fn a_rebuild_names_its_source_and_what_could_be_a_path_is_left_out() {
        let dir = root();
        let database = Database::open(dir.path()).unwrap();
        let found: Vec<_> = database
            .packages()
            .iter()
            .map(|p| (p.name.as_str(), p.source.as_str(), p.source_version.as_str()))
            .collect();
        let wanted = [
            ("dpkg", "dpkg", "1.21"),
            ("libx1", "x", "2:1.0-1"),
            ("libx1", "x", "2:1.0-2"),
            ("tool", "tool", "3-1"),
            ("wrapper", "wrapper", "4-1"),
        ];
        assert_eq!((found, database.native_architecture()), (wanted.to_vec(), "amd64"));
    }

    #[test]
    fn a_diverted_file_belongs_to_the_package_that_it_was_taken_from() {
        let dir = root();
        let database = Database::open(dir.path()).unwrap();
        assert_eq!(owners(&database, "/usr/bin/x-config"), ["wrapper:all"]);
        assert_eq!(owners(&database, "/usr/bin/x-config.tool"), ["tool:amd64"]);
        assert_eq!(owners(&database, "/usr/bin/own"), [""; 0], "an administrator's file has this name");
        assert_eq!(owners(&database, "/usr/bin/own.aside"), ["tool:amd64"]);
    }

    #[test]
    fn sums_are_those_of_the_package() {
        let dir = root();
        let database = Database::open(dir.path()).unwrap();
        let path = PathBuf::from("/usr/lib/x86_64-linux-gnu/libx.so.1.0");
        let found = database.owners(&BTreeSet::from([path.clone()])).unwrap();
        let sum = database.checksum(&found[&path][0]).unwrap().unwrap();
        assert_eq!(hex::encode(sum), "00112233445566778899aabbccddeeff");
        let found = database.owners(&BTreeSet::from(["/usr/share/both".into()])).unwrap();
        assert_eq!(database.checksum(found.values().next().unwrap().last().unwrap()).unwrap(), None);
    }

    #[test]
    fn a_database_that_leads_out_of_its_root_is_not_read() {
        let dir = root();
        let status = dir.path().join("var/lib/dpkg/status");
        fs::remove_file(&status).unwrap();
        assert!(matches!(Database::open(dir.path()), Err(Error::NoDatabase(_))));
        symlink("../../../../../../../../etc/passwd", &status).unwrap();
        assert!(Database::open(dir.path()).unwrap_err().to_string().contains("leads out of"));
    }
}
