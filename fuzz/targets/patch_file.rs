//! Patch file. A checksum protects its body, so raw bytes would always be refused: the first byte of the input selects the whole file or a
//! body with a correct header.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sha2::{Digest, Sha256};
use stillpoint_patch_format as format;

/// Offset of the body in an unsigned file; see the format's crate header.
const HEADER: usize = 56;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((&mode, bytes)) = input.split_first() else { return Corpus::Reject };
    let decoded = if mode & 1 == 0 { format::decode(bytes) } else { format::decode(&under_header(bytes)) };
    if let Ok(signed) = decoded {
        // A decoded patch is valid: it can be encoded and decoded again, and stays the same.
        let written = format::encode(&signed.patch).expect("a decoded patch can be encoded");
        let again = format::decode(&written).expect("an encoded patch can be decoded");
        assert_eq!(again.patch, signed.patch);
    }
    Corpus::Keep
});

fn under_header(body: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER + body.len());
    file.extend_from_slice(b"STILLPT\n");
    file.extend_from_slice(&format::VERSION.to_le_bytes());
    file.extend_from_slice(&0u32.to_le_bytes());
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    file.extend_from_slice(&Sha256::digest(body));
    assert_eq!(file.len(), HEADER);
    file.extend_from_slice(body);
    file
}

fn seeds() -> Vec<Vec<u8>> {
    let file = format::encode(&example::patch()).expect("the example is valid");
    vec![[&[0], &file[..]].concat(), [&[1], &file[HEADER..]].concat()]
}

mod example {
    use super::format::*;

    /// Patch with one item of every kind.
    pub fn patch() -> Patch {
        let section = |name: &str, kind, bytes: Vec<u8>, relocations| Section {
            name: name.into(),
            kind,
            align: 16,
            size: bytes.len() as u64,
            bytes,
            relocations,
        };
        let symbol = |name: &str, value, resolved_by| Symbol { name: name.into(), value, resolved_by };
        let diff = DiffFact { name: "CVE-2024-0001.patch".into(), sha256: [7; 32] };
        Patch {
            name: "CVE-2024-0001".into(),
            description: "an example".into(),
            cves: vec!["CVE-2024-0001".into()],
            replaces: vec![],
            source: Source {
                package: Some("redis".into()),
                version: Some("5:7.0.15-1".into()),
                diffs: vec![diff.clone()],
                units: vec![UnitFact { path: "src/server.c".into(), functions_placed: 3, functions_total: 3 }],
            },
            based_on: vec![diff],
            toolchain: Toolchain { compiler: "cc 12".into(), stillpoint: "0.1.0".into() },
            target: Target {
                build_id: BuildId(vec![1; 20]),
                text_sha256: [2; 32],
                file_name: "redis-server".into(),
                kind: TargetKind::PieExecutable,
            },
            scope: Scope::ThreadLocal,
            scope_stated: false,
            sections: vec![
                section(
                    ".text.f",
                    SectionKind::Text,
                    vec![0xe8, 0, 0, 0, 0, 0xc3, 0x90, 0x90],
                    vec![Relocation { offset: 1, kind: RelocationKind::Branch32, symbol: 1, addend: -4 }],
                ),
                section(".rodata", SectionKind::RoData, vec![0; 16], vec![]),
            ],
            symbols: vec![
                symbol("f", SymbolValue::Patch { section: 0, offset: 0 }, ResolvedBy::Patch),
                symbol("g", SymbolValue::Target(Svma(0x5000)), ResolvedBy::ReverseRelocation),
                symbol("h", SymbolValue::Import { version: Some("GLIBC_2.14".into()) }, ResolvedBy::Runtime),
                symbol("t", SymbolValue::TargetTls(8), ResolvedBy::Placement),
                symbol("o", SymbolValue::OtherPatch, ResolvedBy::Runtime),
            ],
            exports: vec![0],
            functions: vec![Function {
                name: "f".into(),
                unit: "src/server.c".into(),
                old: Range { start: Svma(0x4000), len: 8 },
                old_parts: vec![Range { start: Svma(0x3000), len: 4 }],
                old_bytes: vec![0x55, 0x48, 0x89, 0xe5, 0x90, 0x90, 0x5d, 0xc3],
                new: 0,
                reasons: vec!["instructions differ".into()],
            }],
            constants: Vec::new(),
            data: Vec::new(),
            off_stack: vec![OffStack {
                name: "main".into(),
                range: Range { start: Svma(0x6000), len: 16 },
                reason: "stated by the author".into(),
            }],
            staying: Vec::new(),
            hooks: Hooks { pre_apply: vec![0], ..Hooks::default() },
            types: vec![TypeFact { name: "struct redisServer".into(), size: 4368, members: 300 }],
            escaping: vec!["f".into()],
            warnings: vec!["one".into()],
        }
    }
}
