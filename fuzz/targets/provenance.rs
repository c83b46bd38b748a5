//! Texts and files that show where a program came from: dpkg's database and packages, changelogs, files of security trackers, ELF headers.
//! The first byte selects the decoder.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use std::collections::BTreeSet;
use stillpoint_patch_provenance::deb822::stanzas;
use stillpoint_patch_provenance::{
    Changelog, ElfIdentity, Package, Release, Tracker, compare_versions, each_archived_file, is_package, is_version,
};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((which, bytes)) = input.split_first() else { return Corpus::Reject };
    let text = String::from_utf8_lossy(bytes);
    match which % 6 {
        0 => {
            for stanza in stanzas(&text) {
                if let Some(package) = Package::of_fields(|name| stanza.field(name)) {
                    assert!(is_package(&package.name) && is_package(&package.source));
                    assert!(is_version(&package.version) && is_version(&package.source_version));
                }
            }
        }
        1 => {
            let log = Changelog::parse(&text);
            for entry in &log.0 {
                assert!(is_version(&entry.version));
                let _ = (entry.date_s.and_then(|date| log.version_of(date)), log.cves_between(&entry.version, "9"));
            }
        }
        2 => {
            let release = Release { distribution: "debian".into(), codename: "bookworm".into(), number: "12".into() };
            if let Ok(tracker) = Tracker::parse(bytes, &release, &BTreeSet::from(["redis"])) {
                let _ = tracker.fixed_after("redis", "1");
            }
        }
        3 => {
            let identity = ElfIdentity::of_bytes(bytes);
            assert!(identity.is_none_or(|identity| identity.soname.is_none_or(|name| !name.contains('/'))));
        }
        4 => {
            let mut total = 0;
            let _ = each_archived_file(bytes, |head| {
                total += head.len();
                true
            });
            assert!(total <= bytes.len());
        }
        _ => {
            let (a, b) = text.split_once('\0').unwrap_or((&text, "1-1"));
            assert_eq!(compare_versions(a, b), compare_versions(b, a).reverse());
        }
    }
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let mut header = [0; 1024];
    header[124..136].copy_from_slice(b"00000000005\0");
    header[156] = b'0';
    let mut inputs: Vec<Vec<u8>> = [
        "\0Package: libx1\nStatus: install ok installed\nArchitecture: amd64\nSource: x (1-1)\nVersion: 1-1+b1\n\nPackage: y\n",
        "\u{1}x (1-1) stable; urgency=low\n\n  * CVE-2026-1111\n\n -- A <a@b>  Fri, 03 Apr 2026 14:29:32 +0200\n",
        "\u{2}{\"redis\":{\"CVE-2026-1111\":{\"releases\":{\"bookworm\":{\"status\":\"resolved\",\"fixed_version\":\"1-2\"}}}}}",
        "\u{2}{\"id\":\"CVE-2026-1111\",\"affected\":[{\"package\":{\"ecosystem\":\"Debian:12\",\"name\":\"redis\"},\"ranges\":[{\"type\":\"ECOSYSTEM\",\"events\":[{\"fixed\":\"1-2\"}]}]}]}",
        "\u{5}1:1.0~rc1-1+b1\01.0-1",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into();
    inputs.push([&[4], &header[..]].concat());
    inputs.extend(stillpoint_fuzz::elf_files().into_iter().map(|file| [&[3], &file[..file.len().min(4096)]].concat()));
    inputs
}
