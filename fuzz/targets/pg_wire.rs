//! PostgreSQL's messages in both directions: clients and servers are untrusted. The first byte selects the direction.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_migrate_wire::frame::{Scanner, Step};
use stillpoint_migrate_wire::{Conversation, backend, custom_settings, frontend, scram, startup, touch};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((way, bytes)) = input.split_first() else { return Corpus::Reject };
    match way % 3 {
        0 => {
            let _ = startup::packet_len(bytes);
            if let Ok(startup::Opening::Startup(startup)) = startup::decode(bytes) {
                let mut again = Vec::new();
                startup.encode(&mut again);
                let mut for_server = Vec::new();
                startup.for_server(None).encode(&mut for_server);
                assert!(startup::decode(&for_server).is_ok());
                assert_eq!(startup::decode(&again), Ok(startup::Opening::Startup(startup)));
            }
        }
        1 => stream(bytes, true),
        _ => stream(bytes, false),
    }
    Corpus::Keep
});

/// Reads every message in the same way as the proxy, and checks that all bytes are accounted for.
fn stream(bytes: &[u8], client: bool) {
    let (mut scanner, mut at, mut conversation) = (Scanner::new((1 << 30) - 1), 0, Conversation::default());
    while let Ok(step) = scanner.peek(&bytes[at..]) {
        match step {
            Step::Starved => break,
            Step::Rest(n) => at += n,
            Step::Message(message) => {
                if client {
                    conversation.frontend(message.tag);
                    of_client(message.body);
                } else {
                    conversation.backend(message.tag);
                    of_server(message.body);
                }
                at += scanner.take(&message);
            }
        }
        assert!(at <= bytes.len());
    }
    let _ = (conversation.at_boundary(), conversation.awaits_verdict());
}

fn of_client(body: &[u8]) {
    let _ = frontend::parse_text(body);
    let _ = frontend::bind_statement(body);
    let _ = frontend::password(body);
    if let Ok(initial) = frontend::sasl_initial(body) {
        let _ = scram::Transcript::default().client_first(initial.data);
    }
    if touch(body).custom {
        let _ = custom_settings(&String::from_utf8_lossy(body));
    }
}

fn of_server(body: &[u8]) {
    let _ = backend::authentication(body);
    let _ = backend::parameter_status(body);
    let _ = backend::key_data(body);
    let _ = backend::ready(body);
    let _ = backend::row(body);
    let _ = backend::report(body);
    let _ = scram::Verifier::parse(&String::from_utf8_lossy(body));
}

fn seeds() -> Vec<Vec<u8>> {
    let mut opening = vec![0];
    let parameters = [("user", &b"alice"[..]), ("database", b"shop"), ("replication", b"off"), ("_pq_.x", b"1")];
    if let Ok(startup) = startup::Startup::of(startup::Version::V3_2, parameters) {
        startup.encode(&mut opening);
    }
    let mut client = vec![1];
    frontend::put_query(&mut client, "set app.tenant = 1; select set_config('a.b', 'c', false)");
    frontend::put_parse(&mut client, b"s", b"select $1", &[23]);
    frontend::put_bind(&mut client, b"", b"s", &[b"7"]);
    frontend::put_execute(&mut client, b"");
    client.extend_from_slice(&frontend::SYNC);
    frontend::put_sasl_initial(&mut client, scram::MECHANISM, b"n,,n=,r=abc");
    let mut server = vec![2];
    backend::put_sasl(&mut server, [scram::MECHANISM]);
    backend::put_parameter_status(&mut server, "TimeZone", b"UTC");
    backend::put_key_data(&mut server, &frontend::CancelKey { pid: 1, secret: vec![7; 32] });
    backend::put_fatal(&mut server, "57P01", "the end", None);
    vec![opening, client, server]
}
