//! A restore waits for the addresses that sockets of an image are bound to.

use crate::engine::support::{Redis, connect_to, criu, kernel, own_network, restore, run, scratch, until};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use stillpoint_testing::LineClient;

const V4: &str = "10.7.0.1";
const V6: &str = "fd07::1";

/// Takes a redis that listens at an address into an image, and then removes the address.
#[track_caller]
fn taken(criu: &Path, dir: &Path, address: &str) -> Option<(Redis, LineClient, PathBuf)> {
    own_network();
    run("ip link add near type veth peer name far && ip link set near up && ip link set far up").expect("a cable");
    let (prefix, quick) = if address == V6 { ("64", "nodad") } else { ("24", "") };
    run(&format!("ip addr add {address}/{prefix} dev near {quick}")).expect("an address");
    let mut redis = Redis::start_with(dir, &["--bind", address])?;
    let at: IpAddr = address.parse().expect("an address");
    let mut client = connect_to(at, redis.port);
    assert_eq!(client.ask("PING"), "+PONG");
    let image = dir.join("image");
    redis.victim.checkpoint(criu, &image, &[]);
    run(&format!("ip addr del {address}/{prefix} dev near")).expect("no address");
    Some((redis, client, image))
}

#[test]
fn an_address_that_comes_late_is_waited_for_and_one_that_does_not_is_named() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((_redis, mut client, image)) = taken(&criu, dir.path(), V4) else { return };
    let path = image.to_str().unwrap();
    let told = kernel(&criu, &["restore", "--image", path, "--dry-run"]);
    assert_eq!(told.code, Some(0), "{told}");
    let words = format!("{V4} is not an address of this machine now: the restore waits up to 120 s for it");
    assert!(told.out.contains(&words) || told.err.contains(&words), "{told}");
    let failed = kernel(&criu, &["restore", "--image", path, "--address-limit", "1"]);
    assert_eq!(failed.code, Some(1), "{failed}");
    assert!(failed.err.contains(&format!("{V4} is not an address of this machine, after 1 s")), "{failed}");
    let restored = crate::engine::support::kernel_while(&criu, &["restore", "--image", path], |_| {
        // the phase before the one in which it waits has ended, as in the restore before
        until("the restore to wait", || {
            let journal = std::fs::read_to_string(image.join("journal.log")).ok()?;
            (journal.matches("\"what\":\"prepare\"").count() == 2).then_some(())
        });
        run(&format!("ip addr add {V4}/24 dev near")).unwrap();
    });
    assert_eq!(restored.code, Some(0), "{restored}");
    assert_eq!(client.ask("PING"), "+PONG");
}

/// A socket cannot bind an address of IPv6 until the check for duplicates has ended.
#[test]
fn an_address_of_ipv6_is_there_when_it_is_no_duplicate() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let Some((_redis, mut client, image)) = taken(&criu, dir.path(), V6) else { return };
    run(&format!("ip addr add {V6}/64 dev near")).unwrap();
    assert!(run("ip -6 addr show dev near tentative").unwrap().contains(V6));
    let restored = restore(&criu, &image, &[]);
    assert!(restored.out.contains("waits up to 120 s for the addresses that the image needs: fd07::1"), "{restored}");
    assert_eq!(client.ask("PING"), "+PONG");
}
