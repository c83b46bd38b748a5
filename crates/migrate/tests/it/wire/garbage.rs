//! No bytes make the decoders panic, and a stream has the same meaning in any pieces.

use proptest::prelude::*;
use stillpoint_migrate_wire::frame::{Scanner, Step, put};
use stillpoint_migrate_wire::{Conversation, Status, backend, frontend, scram, startup, touch};

/// Types and lengths of the messages of a stream that arrives in pieces.
fn messages(pieces: &[&[u8]]) -> Vec<(u8, usize)> {
    let (mut scanner, mut found, mut buffer) = (Scanner::new(1 << 20), Vec::new(), Vec::new());
    for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut at = 0;
        loop {
            match scanner.peek(&buffer[at..]).expect("lengths within the limit") {
                Step::Starved => break,
                Step::Rest(n) => at += n,
                Step::Message(message) => {
                    found.push((message.tag, message.len));
                    at += scanner.take(&message);
                }
            }
        }
        buffer.drain(..at);
    }
    assert!(scanner.at_edge() && buffer.is_empty(), "the stream ends between two messages");
    found
}

proptest! {
    #[test]
    fn a_stream_means_the_same_however_it_is_cut(
        bodies in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut stream = Vec::new();
        bodies.iter().for_each(|(tag, body)| put(&mut stream, *tag, |into| into.extend(body)));
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect();
        let expected: Vec<(u8, usize)> = bodies.iter().map(|(tag, body)| (*tag, body.len())).collect();
        prop_assert_eq!(messages(&pieces), expected);
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = startup::packet_len(&bytes);
        let _ = startup::decode(&bytes);
        let _ = backend::authentication(&bytes);
        let _ = backend::parameter_status(&bytes);
        let _ = backend::key_data(&bytes);
        let _ = backend::ready(&bytes);
        let _ = backend::row(&bytes);
        let _ = backend::report(&bytes);
        let _ = frontend::parse_text(&bytes);
        let _ = frontend::bind_statement(&bytes);
        let _ = frontend::sasl_initial(&bytes);
        let _ = frontend::password(&bytes);
        let _ = scram::Verifier::parse(&String::from_utf8_lossy(&bytes));
        let _ = scram::Transcript::default().client_first(&bytes);
        let _ = touch(&bytes);
        let _ = stillpoint_migrate_wire::custom_settings(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_startup_that_is_taken_says_the_same_to_a_server(
        parameters in prop::collection::vec(
            (
                prop::sample::select(&["user", "USER", "database", "replication", "options", "role", "Role", "_pq_.x", ""][..]),
                prop::sample::select(&["alice", "postgres", "", "true", "database"][..]),
            ),
            0..6,
        ),
    ) {
        let mut packet = vec![0, 0, 0, 0, 0, 3, 0, 0];
        for text in parameters.iter().flat_map(|(name, value)| [name, value]) {
            packet.extend(text.bytes().chain([0]));
        }
        packet.push(0);
        let len = u32::try_from(packet.len()).expect("a short packet");
        packet[..4].copy_from_slice(&len.to_be_bytes());
        if let Ok(startup::Opening::Startup(startup)) = startup::decode(&packet) {
            // A server obeys the last of several, and ignores the case of names of settings.
            let last = |wanted: &str| {
                let found = parameters.iter().rfind(|(name, _)| name.eq_ignore_ascii_case(wanted));
                found.map(|(_, value)| *value).filter(|value| !value.is_empty())
            };
            prop_assert_eq!(Some(startup.user()), last("user"));
            let mut bytes = Vec::new();
            startup.for_server(None).encode(&mut bytes);
            let Ok(startup::Opening::Startup(again)) = startup::decode(&bytes) else { panic!("{bytes:?}") };
            let seen = |startup: &startup::Startup| {
                (startup.user().to_owned(), startup.database().to_owned(), startup.replication())
            };
            prop_assert_eq!(seen(&again), seen(&startup));
        }
    }

    #[test]
    fn a_conversation_that_keeps_to_the_protocol_ends_at_a_boundary(
        units in prop::collection::vec((any::<bool>(), 0..3_u8), 1..20),
    ) {
        let mut conversation = Conversation::default();
        for (simple, _) in &units {
            let sent: &[u8] = if *simple { b"Q" } else { b"PBDES" };
            sent.iter().for_each(|tag| conversation.frontend(*tag));
        }
        for (i, (_, status)) in units.iter().enumerate() {
            prop_assert!(!conversation.at_boundary(), "{} of {} units are answered", i, units.len());
            let last = i + 1 == units.len();
            let status = [Status::Idle, Status::InTransaction, Status::Failed][if last { 0 } else { usize::from(*status) }];
            conversation.ready(status);
        }
        prop_assert!(conversation.at_boundary());
    }
}
