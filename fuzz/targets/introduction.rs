//! Introduction of a process to the exec helper, which runs as root, over a socket of this process. The input describes the messages:
//! number, before or after the challenge, changed bytes, and descriptors.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use stillpoint_patch_tracee::launch::introduction::Connected;

/// Version, strict, and the challenge.
const ANSWER_LEN: usize = 18;
/// Length of one message: its time, number of bytes, descriptors, and the changes to the correct answer.
const MESSAGE_LEN: usize = 3 + ANSWER_LEN;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let (messages, _) = input.as_chunks::<MESSAGE_LEN>();
    // an empty message is not sent, and without any message the helper would wait
    let messages: Vec<_> = messages.iter().filter(|message| len(message) > 0).take(4).collect();
    if messages.is_empty() {
        return Corpus::Reject;
    }
    let (helper, mut process) = UnixStream::pair().expect("make a connection");
    let (other, _end) = UnixStream::pair().expect("make another one");
    let connected = Connected::accept(helper).expect("this process is alive");
    let mut answer = [0; ANSWER_LEN];
    answer[0] = 2;
    let (early, late): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| message[0] & 1 == 1);
    early.iter().for_each(|message| send(&process, &other, &answer, message));
    let challenged = connected.challenge().expect("the connection is open");
    process.read_exact(&mut answer[2..]).expect("the challenge");
    late.iter().for_each(|message| send(&process, &other, &answer, message));
    if let Ok(introduced) = challenged.answer() {
        let [message] = &late[..] else { panic!("of several messages one was taken") };
        let right = message[4] & 0xfe == 0 && message[3] == 0 && message[5..].iter().all(|change| *change == 0);
        assert!(early.is_empty() && right && len(message) == ANSWER_LEN && message[2] % 4 == 1);
        assert_eq!(introduced.strict, message[4] == 1);
        assert_eq!(introduced.program.pid().0 as u32, std::process::id());
    }
    Corpus::Keep
});

/// Number of bytes to send: as many as an answer has, fewer, or more.
fn len(message: &[u8; MESSAGE_LEN]) -> usize {
    usize::from(message[1]) % (ANSWER_LEN + 3)
}

fn send(process: &UnixStream, other: &UnixStream, right: &[u8; ANSWER_LEN], message: &[u8; MESSAGE_LEN]) {
    let mut bytes: Vec<u8> = right.iter().zip(&message[3..]).map(|(right, change)| right ^ change).collect();
    bytes.resize(len(message), 7);
    let both: [BorrowedFd<'_>; 2] = [process.as_fd(), other.as_fd()];
    let descriptors = match message[2] % 4 {
        0 => &both[..0],
        1 => &both[..1],
        2 => &both[1..],
        _ => &both[..],
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    // a helper that is done has closed the connection
    let _ = sendmsg(process, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
}

fn seeds() -> Vec<Vec<u8>> {
    let message = |when: u8, descriptors: u8, strict: u8| {
        let mut message = vec![0; MESSAGE_LEN];
        (message[0], message[1], message[2], message[4]) = (when, ANSWER_LEN as u8, descriptors, strict);
        message
    };
    vec![message(0, 1, 0), message(0, 1, 1), message(1, 1, 0), [message(0, 1, 0), message(0, 3, 0)].concat()]
}
