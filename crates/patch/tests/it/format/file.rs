//! The patch file: round trip, damage of every kind, signatures, and each rule of validation.

use stillpoint_patch_format::*;

fn patch() -> Patch {
    let text = Section {
        name: ".text.answer".into(),
        kind: SectionKind::Text,
        align: 16,
        size: 11,
        bytes: vec![0xb8, 42, 0, 0, 0, 0xe8, 0, 0, 0, 0, 0xc3],
        relocations: vec![Relocation { offset: 6, kind: RelocationKind::Branch32, symbol: 1, addend: -4 }],
    };
    Patch {
        name: "answer-1".into(),
        description: "answers 42".into(),
        cves: vec!["CVE-2026-0001".into()],
        replaces: vec![],
        source: Source {
            units: vec![UnitFact { path: "a.c".into(), functions_placed: 1, functions_total: 1 }],
            ..Source::default()
        },
        based_on: vec![DiffFact { name: "first.patch".into(), sha256: [7; 32] }],
        toolchain: Toolchain { compiler: "cc".into(), stillpoint: "0".into() },
        target: Target {
            build_id: BuildId(vec![1; 20]),
            text_sha256: [2; 32],
            file_name: "victim".into(),
            kind: TargetKind::PieExecutable,
        },
        scope: Scope::ThreadLocal,
        scope_stated: false,
        sections: vec![text],
        symbols: vec![
            Symbol {
                name: "answer".into(),
                value: SymbolValue::Patch { section: 0, offset: 0 },
                resolved_by: ResolvedBy::Patch,
            },
            Symbol {
                name: "helper".into(),
                value: SymbolValue::Target(Svma(0x1200)),
                resolved_by: ResolvedBy::Placement,
            },
            Symbol { name: "tls".into(), value: SymbolValue::TargetTls(8), resolved_by: ResolvedBy::Placement },
        ],
        exports: vec![0],
        functions: vec![Function {
            name: "answer".into(),
            unit: "a.c".into(),
            old: Range { start: Svma(0x1000), len: 4 },
            old_parts: vec![],
            old_bytes: vec![0x90, 0x90, 0x90, 0xc3],
            new: 0,
            reasons: vec!["instructions differ".into()],
        }],
        constants: Vec::new(),
        data: Vec::new(),
        off_stack: vec![OffStack {
            name: "loop".into(),
            range: Range { start: Svma(0x1100), len: 16 },
            reason: "stated by the author".into(),
        }],
        staying: Vec::new(),
        hooks: Hooks { pre_apply: vec![0], ..Hooks::default() },
        types: vec![],
        escaping: vec![],
        warnings: vec![],
    }
}

#[test]
fn what_was_written_is_read() {
    let patch = patch();
    let read = decode(&encode(&patch).unwrap()).unwrap();
    assert_eq!(read.patch, patch);
    assert_eq!(read.key_id(), None);
    assert!(matches!(read.verify(&[]), Err(Error::Unsigned)));
}

#[test]
fn every_flipped_bit_is_seen() {
    let key = SecretKey::from_seed([9; 32]);
    for good in [encode(&patch()).unwrap(), encode_signed(&patch(), &key).unwrap()] {
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            // A flip in the signature block leaves the patch readable, and must fail verification.
            let accepted = decode(&bad).is_ok_and(|signed| signed.verify(&[key.public()]).is_ok());
            let unsigned_accepted = decode(&bad).is_ok_and(|signed| signed.key_id().is_none());
            assert!(!accepted && !unsigned_accepted, "flipped bit {at} went unnoticed");
        }
    }
}

#[test]
fn every_truncation_and_every_tail_is_seen() {
    let good = encode(&patch()).unwrap();
    for len in 0..good.len() {
        assert!(matches!(decode(&good[..len]), Err(Error::Truncated { .. })), "{len} bytes were accepted");
    }
    let long = [&good[..], b"x"].concat();
    assert!(matches!(decode(&long), Err(Error::TrailingBytes(1))));
    assert!(matches!(decode(b"\x7fELF\x02\x01\x01\x00 and more"), Err(Error::Magic)));
}

#[test]
fn signatures_name_their_key() {
    let (ours, theirs) = (SecretKey::from_seed([1; 32]), SecretKey::from_seed([2; 32]));
    let read = decode(&encode_signed(&patch(), &ours).unwrap()).unwrap();
    assert_eq!(read.verify(&[theirs.public(), ours.public()]).unwrap(), ours.public().id());
    assert!(matches!(read.verify(&[theirs.public()]), Err(Error::UnknownKey(id)) if id == ours.public().id()));
    let again = PublicKey::parse(&ours.public().to_text()).unwrap();
    assert_eq!(again.id(), SecretKey::parse(&ours.to_text()).unwrap().public().id());
    assert!(PublicKey::parse("zz").is_err());
    assert!(!format!("{ours:?}").contains(ours.to_text().trim()), "a secret key was printed");
}

#[test]
fn each_rule_refuses_its_breach() {
    type Breach = (&'static str, fn(&mut Patch));
    let breaches: &[Breach] = &[
        ("patch name", |p| p.name = "no spaces".into()),
        ("neither a function nor a constant", |p| p.functions.clear()),
        ("alignment", |p| p.sections[0].align = 3),
        ("bytes stored", |p| p.sections[0].size = 12),
        ("reaches past", |p| p.sections[0].relocations[0].offset = 8),
        ("names symbol", |p| p.sections[0].relocations[0].symbol = 99),
        ("against tls", |p| p.sections[0].relocations[0].symbol = 2),
        ("does not exist", |p| p.symbols[0].value = SymbolValue::Patch { section: 0, offset: 99 }),
        ("is not code", |p| p.functions[0].new = 1),
        ("old bytes", |p| p.functions[0].old.len = 5),
        ("overlap", |p| p.functions.push(Function { name: "again".into(), ..p.functions[0].clone() })),
        ("export", |p| p.exports = vec![1]),
        ("hook", |p| p.hooks.post_revert = vec![1]),
        ("range of 0 bytes", |p| p.off_stack[0].range.len = 0),
        ("bytes of constants", |p| {
            let old = Range { start: Svma(0x5000), len: 8 };
            p.constants.push(Constant { name: "table".into(), unit: "a.c".into(), old, new: 0 });
        }),
        ("may stay in nowhere", |p| p.staying = vec!["nowhere".into()]),
        ("build-id", |p| p.target.build_id = BuildId(vec![0; 65])),
    ];
    for (fragment, breach) in breaches {
        let mut patch = patch();
        breach(&mut patch);
        let error = encode(&patch).expect_err(fragment).to_string();
        assert!(error.contains(fragment), "{error:?} does not say {fragment:?}");
    }
}

/// A patch that changes four bytes of data, at the start of a section of its own for each side.
fn patch_with_data() -> Patch {
    let mut patch = patch();
    let contents = |name: &str, byte| Section {
        name: name.into(),
        kind: SectionKind::RoData,
        align: 8,
        size: 8,
        bytes: vec![byte; 8],
        relocations: vec![],
    };
    patch.sections.extend([contents(".rodata.shipped", 1), contents(".data.new", 2)]);
    let symbol = |section| Symbol {
        name: "limits".into(),
        value: SymbolValue::Patch { section, offset: 0 },
        resolved_by: ResolvedBy::Patch,
    };
    patch.symbols.extend([symbol(1), symbol(2)]);
    let (name, unit, old) = ("limits".into(), "a.c".into(), Range { start: Svma(0x4000), len: 8 });
    patch.data = vec![DataChange { name, unit, old, shipped: 3, new: 4 }];
    patch.scope = Scope::Process;
    patch
}

fn version_of(bytes: &[u8]) -> u8 {
    bytes[8]
}

#[test]
fn data_are_read_back_and_only_their_files_have_the_newer_version() {
    let (with, without) = (encode(&patch_with_data()).unwrap(), encode(&patch()).unwrap());
    assert_eq!(decode(&with).unwrap().patch, patch_with_data());
    assert_eq!((version_of(&with), version_of(&without)), (4, 3));
    let mut other = with.clone();
    other[8] = 3;
    assert!(matches!(decode(&other), Err(Error::TrailingBytes(_))));
    let mut other = without;
    other[8] = 4;
    assert!(decode(&other).is_err(), "no data follow");
}

#[test]
fn data_that_cannot_be_written_are_refused() {
    let refused = |text: &str, spoil: &dyn Fn(&mut Patch)| {
        let mut patch = patch_with_data();
        spoil(&mut patch);
        let error = encode(&patch).expect_err(text).to_string();
        assert!(error.contains(text), "{text}: {error}");
    };
    refused("scope", &|p| p.scope = Scope::ThreadGroup);
    refused("shipped contents", &|p| p.data[0].shipped = 0);
    refused("new contents", &|p| p.data[0].new = 99);
    refused("new contents", &|p| p.data[0].new = 1);
    refused("shipped contents", &|p| p.data[0].old.len = 9);
    refused("range of 0 bytes", &|p| p.data[0].old.len = 0);
    refused("overlap", &|p| p.data.push(p.data[0].clone()));
    // its value would be that of another place
    refused("new contents", &|p| {
        p.sections[2].relocations = vec![Relocation { offset: 0, kind: RelocationKind::Pc32, symbol: 1, addend: 0 }];
    });
    refused("bytes of data change", &|p| {
        let len = DATA_MAX + 1;
        for section in [1, 2] {
            (p.sections[section].size, p.sections[section].bytes) = (len, vec![0; len as usize]);
        }
        p.data[0].old.len = len;
    });
}
