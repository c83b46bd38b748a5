//! Images that an earlier version has sealed.

use crate::engine::support::{Redis, criu, restore, scratch, skip};
use stillpoint_testing::binary::{earlier, with};

#[test]
#[ignore = "full tier: an earlier version is compiled, three minutes of two processors"]
fn what_an_earlier_version_has_sealed_is_restored() {
    let (Some(criu), dir) = (criu(), scratch()) else { return };
    let earlier = match earlier() {
        Ok(earlier) => earlier,
        Err(why) => return skip(why),
    };
    let Some((mut redis, mut client)) = Redis::with_data(dir.path()) else { return };
    for how in ["eager", "on-demand"] {
        let image = dir.path().join(how);
        with(earlier, || redis.victim.checkpoint(&criu, &image, &[]));
        restore(&criu, &image, &["--restore", how]);
        assert_eq!(client.ask("PING"), "+PONG", "{how}");
    }
}
