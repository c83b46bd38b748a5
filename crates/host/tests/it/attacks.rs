//! Cache tests in which users of the cache are killed, its files are damaged, and several processes use it at the same time.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use stillpoint_host::cache::State;
use stillpoint_host::{Cache, EntryName, Error};
use stillpoint_testing::{skipped, wait};
use tempfile::TempDir;

const FILES: usize = 20;
const NAME: EntryName = EntryName::new("demo", "entry-1");

/// Serializes the tests: a forked process holds the locks of this one too, until it executes its program.
static ONE: Mutex<()> = Mutex::new(());

/// Directory with the cache in `cache` and the number of makings in `made`.
struct Place {
    directory: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn new() -> Place {
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        Place { directory: tempfile::tempdir().expect("make a directory"), _alone: alone }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn cache(&self) -> Cache {
        Cache::at(&self.at("cache")).expect("open the cache")
    }

    fn entry(&self) -> PathBuf {
        self.at("cache/demo/entry-1")
    }

    /// Returns the entry for a new user of the cache.
    fn use_entry(&self, pause: Duration) -> PathBuf {
        let cache = self.cache();
        let path = cache.entry(&NAME, |into| make(into, &self.at("made"), pause)).expect("an entry");
        assert_whole(&path);
        path
    }

    fn times_made(&self) -> usize {
        fs::read_to_string(self.at("made")).map_or(0, |text| text.lines().count())
    }

    /// Starts a user of the entry in a process of its own, under `prefix`.
    fn child(&self, prefix: &[&str], job: &str) -> Child {
        let mut words: Vec<&str> = prefix.to_vec();
        let own = std::env::current_exe().expect("this program has a path");
        words.extend([
            own.to_str().expect("a path is text"),
            "attacks::child",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ]);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("CHILD_JOB", job).env("CHILD_PLACE", self.directory.path());
        command.env("STILLPOINT_CACHE_LOG", self.at("log"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a process")
    }
}

/// Writes files with pauses between them; first logs the call.
fn make(into: &Path, made: &Path, pause: Duration) -> Result<(), Error> {
    let mut log = fs::File::options().append(true).create(true).open(made).expect("open the note");
    log.write_all(b"made\n").expect("write the note");
    assert_eq!(fs::read_dir(into).expect("list the directory").count(), 0, "a maker finds an empty directory");
    fs::create_dir(into.join("empty")).expect("make a directory");
    symlink("file-0", into.join("link")).expect("make a link");
    for number in 0..FILES {
        fs::write(into.join(format!("file-{number}")), format!("{number}").repeat(100)).expect("write a file");
        std::thread::sleep(pause);
    }
    Ok(())
}

#[track_caller]
fn assert_whole(path: &Path) {
    for number in 0..FILES {
        let text = fs::read_to_string(path.join(format!("file-{number}"))).expect("read a file");
        assert_eq!(text, format!("{number}").repeat(100));
    }
    assert!(path.join("empty").is_dir() && path.join("link").exists());
}

/// Body of the processes that other tests start; alone it tests nothing.
#[test]
fn child() {
    let Some(place) = std::env::var_os("CHILD_PLACE") else { return };
    let cache = Cache::at(&Path::new(&place).join("cache"));
    let job = std::env::var("CHILD_JOB").expect("a job");
    if job == "open" {
        println!("opened: {}", cache.err().map_or("yes".to_owned(), |error| error.to_string()));
        return;
    }
    let cache = cache.expect("open the cache");
    if job == "clean-below-mounts" {
        return clean_below_mounts(&cache, Path::new(&place));
    }
    let made = Path::new(&place).join("made");
    let path = cache.entry(&NAME, |into| make(into, &made, Duration::from_millis(2))).expect("an entry");
    assert_whole(&path);
    println!("has the entry");
    // until the pipe is closed
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(cache);
}

/// Reads until a line contains `text`; returns the reader, since closing the pipe would end its writer.
fn until_line(child: &mut Child, text: &str) -> (String, BufReader<ChildStdout>) {
    let mut reader = BufReader::new(child.stdout.take().expect("a pipe"));
    loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).expect("read a line"), 0, "the process ended before {text:?}");
        if line.contains(text) {
            return (line, reader);
        }
    }
}

#[test]
fn processes_at_once_make_an_entry_once() {
    let place = Place::new();
    let mut children: Vec<Child> = (0..4).map(|_| place.child(&[], "use")).collect();
    let readers: Vec<_> = children.iter_mut().map(|child| until_line(child, "has the entry").1).collect();
    assert_eq!(place.times_made(), 1);
    for child in &mut children {
        drop(child.stdin.take());
    }
    drop(readers.into_iter().map(|reader| reader.lines().count()).collect::<Vec<_>>());
    assert!(children.iter_mut().all(|child| child.wait().expect("wait").success()));
    let log = fs::read_to_string(place.at("log")).expect("read the log");
    let (hits, misses): (Vec<&str>, Vec<&str>) = log.lines().partition(|line| *line == "hit demo/entry-1");
    assert_eq!((hits.len(), misses.len()), (3, 1), "{log}");
    assert!(misses[0].starts_with("miss demo/entry-1 "), "{log}");
}

/// Kills the maker after 0, 1, 2, ... files; other processes find only complete entries.
#[test]
fn a_maker_killed_at_any_moment_leaves_no_half_entry() {
    let place = Place::new();
    for moment in 0..=FILES {
        let before = place.times_made();
        let mut child = place.child(&[], "use");
        let half = place.at("cache/demo/entry-1.half");
        wait::until("the maker to come so far", || {
            let files = fs::read_dir(&half).map_or(0, |entries| entries.count());
            let done = place.entry().exists();
            (done || (place.times_made() > before && files > moment)).then_some(())
        });
        child.kill().expect("kill the maker");
        child.wait().expect("wait for the maker");
        // in half of the rounds another process evicts first
        if moment % 2 == 0 {
            place.cache().evict(u64::MAX).expect("evict");
            assert!(!half.exists(), "remains of a killed process are removed");
        }
        place.use_entry(Duration::ZERO);
        assert!(!half.exists());
        let removed = place.cache().clean().expect("clean");
        assert_eq!((&removed.entries[..], &removed.in_use[..]), (&["demo/entry-1".to_owned()][..], &[][..]));
        assert_eq!(fs::read_dir(place.at("cache/trash")).map_or(0, |entries| entries.count()), 0);
        assert_eq!(fs::read_dir(place.at("cache/demo")).expect("list").count(), 0);
    }
}

/// Kills the process that removes entries; the next process finishes the removal.
#[test]
fn trash_of_a_killed_process_is_removed() {
    let place = Place::new();
    place.use_entry(Duration::ZERO);
    let trash = place.at("cache/trash");
    fs::create_dir_all(&trash).expect("make a directory");
    fs::rename(place.entry(), trash.join("1-0-abc.removed")).expect("move the entry");
    fs::create_dir(trash.join("of-another-program")).expect("make a directory");
    place.use_entry(Duration::ZERO);
    assert_eq!(place.times_made(), 2);
    let names: Vec<_> = fs::read_dir(&trash).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
    assert_eq!(names, ["of-another-program"]);
}

#[test]
fn damaged_entries_are_made_again() {
    let place = Place::new();
    let entry = place.use_entry(Duration::ZERO);
    let listed = place.at("cache/demo/entry-1.manifest");
    let truncate = |path: &Path, size| fs::File::options().write(true).open(path).and_then(|file| file.set_len(size));
    let garbage = |path: &Path| fs::write(path, "stillpoint-cache 1 0\n");
    type Damage<'a> = Box<dyn Fn() -> std::io::Result<()> + 'a>;
    let damages: Vec<(&str, Damage)> = vec![
        ("a truncated file", Box::new(|| truncate(&entry.join("file-3"), 5))),
        ("an emptied file", Box::new(|| truncate(&entry.join("file-0"), 0))),
        ("a removed file", Box::new(|| fs::remove_file(entry.join("file-7")))),
        ("a removed directory", Box::new(|| fs::remove_dir(entry.join("empty")))),
        ("a removed link", Box::new(|| fs::remove_file(entry.join("link")))),
        (
            "a file in the place of a directory",
            Box::new(|| {
                fs::remove_dir(entry.join("empty"))?;
                fs::write(entry.join("empty"), "")
            }),
        ),
        (
            "a link in the place of a file",
            Box::new(|| {
                fs::rename(entry.join("file-2"), place.at("elsewhere"))?;
                symlink(place.at("elsewhere"), entry.join("file-2"))
            }),
        ),
        ("a removed entry", Box::new(|| fs::remove_dir_all(&entry))),
        (
            "a file in the place of the entry",
            Box::new(|| {
                fs::remove_dir_all(&entry)?;
                fs::write(&entry, "")
            }),
        ),
        ("a truncated manifest", Box::new(|| truncate(&listed, 70))),
        ("an empty manifest", Box::new(|| truncate(&listed, 0))),
        ("another manifest", Box::new(|| garbage(&listed))),
        ("a removed manifest", Box::new(|| fs::remove_file(&listed))),
    ];
    for (number, (what, damage)) in damages.iter().enumerate() {
        damage().unwrap_or_else(|error| panic!("{what}: {error}"));
        place.use_entry(Duration::ZERO);
        assert_eq!(place.times_made(), 2 + number, "{what} is noticed");
        fs::write(entry.join("extra"), "of a user").expect("write a file");
        place.use_entry(Duration::ZERO);
        assert_eq!(place.times_made(), 2 + number, "a whole entry is used, with a further file too");
    }
}

#[test]
fn what_users_change_is_left_out() {
    let place = Place::new();
    let name = EntryName::new("demo", "root-1").changing(&["tmp"]);
    let use_it = |times| {
        let path = place.cache().entry(&name, |into| {
            make(into, &place.at("made"), Duration::ZERO)?;
            fs::create_dir(into.join("tmp")).expect("make a directory");
            fs::write(into.join("tmp/log"), "first").expect("write a file");
            Ok::<(), Error>(())
        });
        assert_eq!(place.times_made(), times);
        path.expect("an entry")
    };
    let path = use_it(1);
    fs::remove_file(path.join("tmp/log")).expect("remove a file");
    use_it(1);
    fs::remove_dir(path.join("tmp")).expect("remove a directory");
    use_it(2);
}

#[test]
fn a_failed_maker_leaves_nothing() {
    let place = Place::new();
    let failed = place.cache().entry(&NAME, |into| {
        fs::write(into.join("part"), "x").expect("write a file");
        Err(Error::NoRoot)
    });
    assert!(matches!(failed, Err(Error::NoRoot)));
    assert_eq!(fs::read_dir(place.at("cache/demo")).expect("list").count(), 0);
    place.use_entry(Duration::ZERO);
}

#[test]
fn damaged_files_are_not_loaded() {
    let place = Place::new();
    let cache = place.cache();
    assert_eq!(cache.load("object", "a.o"), None);
    cache.store("object", "a.o", b"machine code").expect("store");
    let path = place.at("cache/object/a.o");
    let whole = fs::read(&path).expect("read");
    for end in 0..whole.len() {
        fs::write(&path, &whole[..end]).expect("truncate");
        assert_eq!(cache.load("object", "a.o"), None, "{end} bytes");
    }
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 4;
        fs::write(&path, changed).expect("change");
        assert_eq!(cache.load("object", "a.o"), None, "byte {at}");
    }
    cache.store("object", "a.o", b"machine code").expect("store");
    assert_eq!(cache.load("object", "a.o").as_deref(), Some(&b"machine code"[..]));
}

#[test]
fn a_directory_of_another_user_is_refused() {
    let place = Place::new();
    let root = place.at("cache");
    fs::create_dir(&root).expect("make a directory");
    for mode in [0o775, 0o757, 0o1777] {
        fs::set_permissions(&root, fs::Permissions::from_mode(mode)).expect("change the mode");
        let error = Cache::at(&root).expect_err("others may write there");
        assert!(matches!(error, Error::ForeignRoot { mode: found, .. } if found == mode), "{error}");
    }
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).expect("change the mode");
    Cache::at(&root).expect("its own");
    if !rustix::process::geteuid().is_root() {
        return skipped("giving a directory to another user needs root");
    }
    chown(&root, Some(65534), None).expect("give the directory away");
    let error = Cache::at(&root).expect_err("another user's");
    assert!(error.to_string().contains("owned by uid 65534 with mode 0755"), "{error}");
}

#[test]
fn a_limit_that_is_no_number_is_refused() {
    let place = Place::new();
    let mut child = place.child(&["env", "STILLPOINT_CACHE_GIB=many"], "open");
    let (line, reader) = until_line(&mut child, "opened");
    assert!(line.contains("STILLPOINT_CACHE_GIB=\"many\" is no number of GiB"), "{line}");
    assert!(reader.lines().all(|line| line.is_ok()) && child.wait().expect("wait").success());
}

#[test]
fn names_lead_nowhere_else() {
    let place = Place::new();
    let cache = place.cache();
    let deep = "x".repeat(300);
    for (kind, name) in
        [("demo", ".."), ("demo", "a/b"), ("..", "a"), ("locks", "a"), ("demo", "a.half"), ("demo", &deep)]
    {
        let made = cache.entry(&EntryName::new(kind, name), |_| Ok::<(), Error>(()));
        assert!(matches!(made, Err(Error::Name { .. })), "{kind}/{name}");
    }
}

#[test]
fn eviction_spares_what_a_process_uses() {
    let place = Place::new();
    let mut child = place.child(&[], "use");
    let (_, reader) = until_line(&mut child, "has the entry");
    let removed = place.cache().clean().expect("clean");
    assert_eq!((&removed.entries[..], &removed.in_use[..]), (&[][..], &["demo/entry-1".to_owned()][..]));
    assert_whole(&place.entry());
    drop(child.stdin.take());
    assert!(reader.lines().all(|line| line.is_ok()) && child.wait().expect("wait").success());
    assert_eq!(place.cache().clean().expect("clean").entries, ["demo/entry-1"]);
    assert!(!place.entry().exists());
}

#[test]
fn the_least_recently_used_go_first() {
    let place = Place::new();
    let cache = place.cache();
    let fill = |into: &Path| fs::write(into.join("bytes"), vec![1; 1 << 20]).map_err(|_| Error::NoRoot);
    let hours_ago = |hours: u64| SystemTime::now() - Duration::from_secs(3600 * hours);
    for (name, hours) in [("a", 1), ("b", 3), ("c", 2)] {
        place.cache().entry(&EntryName::new("demo", name), fill).expect("an entry");
        let listed = fs::File::options().append(true).open(place.at(&format!("cache/demo/{name}.manifest")));
        listed.and_then(|file| file.set_modified(hours_ago(hours))).expect("set the time");
    }
    cache.directory("corpus", "grows").expect("a directory");
    cache.store("object", "one.o", &[7; 5000]).expect("store");
    fs::write(place.at("cache/demo/of-another-program"), "x").expect("write a file");
    fs::create_dir_all(place.at("cache/documents/letters")).expect("make a directory");
    let order: Vec<(String, State)> = cache.list().expect("list").into_iter().map(|i| (i.name, i.state)).collect();
    let named = |name: &str, state| (name.to_owned(), state);
    let (whole, grows) = (State::Whole, State::Grows);
    assert_eq!(order[..3], [named("b", whole), named("c", whole), named("a", whole)]);
    // made at about the same time
    assert!(order[3..].contains(&named("grows", grows)) && order[3..].contains(&named("one.o", State::File)));
    // this use makes it the most recent one
    place.cache().entry(&EntryName::new("demo", "b"), fill).expect("an entry");
    let removed = cache.evict(5 << 19).expect("evict");
    assert_eq!(removed.entries, ["demo/c"]);
    assert!(removed.bytes >= 1 << 20);
    // this cache uses the one directory
    assert_eq!(cache.clean().expect("clean").in_use, ["corpus/grows"]);
    drop(cache);
    place.cache().clean().expect("clean");
    assert!(place.cache().list().expect("list").is_empty());
    assert!(place.at("cache/demo/of-another-program").exists() && place.at("cache/documents/letters").exists());
}

#[test]
fn working_directories_of_killed_processes_are_removed() {
    let place = Place::new();
    let cache = place.cache();
    let scratch = cache.scratch().expect("a directory");
    let own = scratch.path().to_owned();
    let dead = place.at("cache/scratch/1-0");
    fs::create_dir_all(dead.join("a")).expect("make a directory");
    fs::write(place.at("cache/locks/scratch-1-0.use"), "").expect("make a lock");
    cache.evict(u64::MAX).expect("evict");
    assert!(own.exists() && !dead.exists());
    drop(scratch);
    assert!(!own.exists());
}

/// In a mount namespace of its own: files behind a mount stay, and the mount is reported.
fn clean_below_mounts(cache: &Cache, place: &Path) {
    cache.entry(&NAME, |into| make(into, &place.join("made"), Duration::ZERO)).expect("an entry");
    let outside = place.join("outside");
    fs::create_dir(&outside).expect("make a directory");
    fs::write(outside.join("stays"), "x").expect("write a file");
    let half = place.join("cache/demo/entry-2.half");
    let mounted = [place.join("cache/demo/entry-1/empty"), half.join("dev/shm"), half.join("file")];
    fs::create_dir_all(&mounted[1]).expect("make a directory");
    fs::write(&mounted[2], "").expect("make a file");
    fs::write(place.join("cache/locks/demo-entry-2.use"), "").expect("make a lock");
    for (at, what) in mounted.iter().zip([&outside, &outside, &outside.join("stays")]) {
        let status = Command::new("mount").arg("--bind").arg(what).arg(at).status().expect("run mount");
        assert!(status.success(), "mount {}", at.display());
    }
    let other = Cache::at(cache.root()).expect("open the cache");
    // an entry is made although remains of an earlier maker are in the way
    other
        .entry(&EntryName::new("demo", "entry-2"), |into| make(into, &place.join("made"), Duration::ZERO))
        .expect("made");
    fs::remove_file(place.join("cache/demo/entry-1/file-1")).expect("damage the entry");
    other.entry(&NAME, |into| make(into, &place.join("made"), Duration::ZERO)).expect("made again");
    let removed = other.evict(u64::MAX).expect("evict");
    assert_eq!(fs::read_to_string(outside.join("stays")).expect("it is there"), "x");
    println!("mounts that stay: {}", removed.mounts.len());
}

#[test]
fn removal_enters_no_mount() {
    if !rustix::process::geteuid().is_root() {
        return skipped("mounting needs root");
    }
    let place = Place::new();
    let unshare = ["unshare", "--mount", "--propagation", "private", "--"];
    let mut child = place.child(&unshare, "clean-below-mounts");
    let (line, reader) = until_line(&mut child, "mounts that stay");
    assert!(reader.lines().all(|line| line.is_ok()) && child.wait().expect("wait").success());
    assert!(line.trim().ends_with("mounts that stay: 3"), "{line}");
    assert!(place.at("outside/stays").exists());
    // the mounts ended with the namespace
    assert!(place.cache().clean().expect("clean").mounts.is_empty());
    assert_eq!(fs::read_dir(place.at("cache/trash")).expect("list").count(), 0);
}
