//! Examples of each command: `--help` ends with them, and the page of the command in `man/` has them too.

/// Examples of `stillpoint`.
pub(crate) const STILLPOINT: &str = "\
Examples:
  # Apply a patch to every process of a systemd unit
  stillpoint patch apply fix.patch --unit redis-server
  # Report what a database holds, and what a migration does with it
  stillpoint migrate check --source \"host=10.0.0.1 dbname=shop\" --target host=10.0.0.2";

/// Examples of `stillpoint patch`.
pub(crate) const PATCH: &str = "\
Examples:
  # Predict the effect of a patch on a process
  stillpoint patch check fix.patch --pid 4121
  # Apply it
  stillpoint patch apply fix.patch --pid 4121";

/// Examples of `stillpoint patch key`.
pub(crate) const PATCH_KEY: &str = "\
Examples:
  # Make a key that signs patches
  stillpoint patch key generate -o /root/keys
  # Print the id of a key
  stillpoint patch key show /etc/stillpoint/keys/stillpoint-3f2a.pub";

/// Examples of `stillpoint migrate`.
pub(crate) const MIGRATE: &str = "\
Examples:
  # Report what will become of every object
  stillpoint migrate check --source \"host=10.0.0.1 dbname=shop\" --target host=10.0.0.2
  # Move the database
  stillpoint migrate run --source \"host=10.0.0.1 dbname=shop\" --target host=10.0.0.2";

/// Examples of `stillpoint kernel`.
pub(crate) const KERNEL: &str = "\
Examples:
  # Measure with a trial image how long a unit is stopped
  stillpoint kernel check --unit redis-server --rehearse
  # Write a unit into an image
  stillpoint kernel checkpoint --unit redis-server --image /run/stillpoint/redis";

/// Examples of `stillpoint measure`.
pub(crate) const MEASURE: &str = "\
Examples:
  # Send 20,000 requests a second for 30 seconds, and record each
  stillpoint measure redis --addr 127.0.0.1:6379 --rate 20000 --duration 30 --record load.rec
  # Check a recorded history
  stillpoint measure check run.history";

/// Examples of `stillpoint patch apply`.
pub(crate) const PATCH_APPLY: &str = "\
Examples:
  # Apply a patch to one process
  stillpoint patch apply fix.patch --pid 4121
  # Apply a signed patch to all processes of PostgreSQL
  stillpoint patch apply --policy signed fix.patch --exe /usr/lib/postgresql/15/bin/postgres
  # Migrate all threads in one moment at their quiescence points, or roll back after 2 s
  stillpoint patch apply --quiescence global --timeout 2s fix.patch --unit mariadb";

/// Examples of `stillpoint patch build`.
pub(crate) const PATCH_BUILD: &str = "\
Examples:
  # Bring a running older package to the newest security level
  stillpoint patch build --debian redis --shipped 5:7.0.15-1~deb12u7 --target redis-server
  # Build a patch for your own program
  stillpoint patch build --source . --compile-commands cc.json --target build/server --diff fix.diff";

/// Examples of `stillpoint patch check`.
pub(crate) const PATCH_CHECK: &str = "\
Examples:
  # Predict the effect of a patch on one process
  stillpoint patch check fix.patch --pid 4121
  # Check all processes of a unit, as JSON
  stillpoint --json patch check fix.patch --unit redis-server";

/// Examples of `stillpoint patch disable`.
pub(crate) const PATCH_DISABLE: &str = "\
Examples:
  # Remove all enabled patches of a unit
  stillpoint patch disable --unit redis-server
  # Remove one patch from all units
  stillpoint patch disable CVE-2026-25243";

/// Examples of `stillpoint patch enable`.
pub(crate) const PATCH_ENABLE: &str = "\
Examples:
  # Start a unit with a patch from now on
  stillpoint patch enable fix.patch --unit redis-server
  # Print what would be written
  stillpoint patch enable fix.patch --unit redis-server --dry-run";

/// Examples of `stillpoint patch enabled`.
pub(crate) const PATCH_ENABLED: &str = "\
Examples:
  # List all enabled patches
  stillpoint patch enabled
  # List those of one unit as JSON
  stillpoint --json patch enabled --unit redis-server";

/// Examples of `stillpoint patch exec`.
pub(crate) const PATCH_EXEC: &str = "\
Examples:
  # Start a program with all patches of a directory, or not at all
  stillpoint patch exec --patches /etc/server/patches --strict -- /usr/local/bin/server
  # Start it with the patches that are enabled for a unit
  stillpoint patch exec --unit redis-server -- /usr/bin/redis-server /etc/redis/redis.conf";

/// Examples of `stillpoint patch exec-helper`.
pub(crate) const PATCH_EXEC_HELPER: &str = "\
Examples:
  # Let systemd start the helper for each connection
  systemctl enable --now stillpoint-exec.socket   # runs: stillpoint patch exec-helper
  # Listen without systemd
  stillpoint patch exec-helper --listen /run/stillpoint/exec.sock
  # Accept only signed patches
  stillpoint patch exec-helper --listen /run/stillpoint/exec.sock --policy signed";

/// Examples of `stillpoint patch gdb`.
pub(crate) const PATCH_GDB: &str = "\
Examples:
  # Write the files of a process
  stillpoint patch gdb --pid 4121
  # Write them to another directory
  stillpoint patch gdb --pid 4121 --output /root/redis-gdb";

/// Examples of `stillpoint patch inspect`.
pub(crate) const PATCH_INSPECT: &str = "\
Examples:
  # Print what a patch changes and why
  stillpoint patch inspect fix.patch
  # Print the same as JSON
  stillpoint --json patch inspect fix.patch";

/// Examples of `stillpoint patch key generate`.
pub(crate) const PATCH_KEY_GENERATE: &str = "\
Examples:
  # Make a key that signs patches
  stillpoint patch key generate -o /root/keys
  # Make one and print its id as JSON
  stillpoint --json patch key generate -o /root/keys";

/// Examples of `stillpoint patch key show`.
pub(crate) const PATCH_KEY_SHOW: &str = "\
Examples:
  # Print the id of a key
  stillpoint patch key show /etc/stillpoint/keys/stillpoint-3f2a.pub
  # Print it as JSON
  stillpoint --json patch key show /root/keys/stillpoint-3f2a.key";

/// Examples of `stillpoint patch list`.
pub(crate) const PATCH_LIST: &str = "\
Examples:
  # List all patched processes
  stillpoint patch list
  # Give the list to node_exporter
  stillpoint patch list --prometheus >/var/lib/prometheus/node-exporter/stillpoint.prom";

/// Examples of `stillpoint patch refresh`.
pub(crate) const PATCH_REFRESH: &str = "\
Examples:
  # Follow an upgrade of all units
  stillpoint patch refresh
  # Print what has changed for one unit
  stillpoint patch refresh --unit redis-server --dry-run";

/// Examples of `stillpoint patch revert`.
pub(crate) const PATCH_REVERT: &str = "\
Examples:
  # Revert the newest patch of a process
  stillpoint patch revert --pid 4121
  # Revert every patch of all processes of a unit
  stillpoint patch revert --all --unit redis-server";

/// Examples of `stillpoint patch status`.
pub(crate) const PATCH_STATUS: &str = "\
Examples:
  # Verify the patches of one process
  stillpoint patch status --pid 4121
  # Print the state of all processes of a unit as JSON
  stillpoint --json patch status --unit mariadb";

/// Examples of `stillpoint patch target`.
pub(crate) const PATCH_TARGET: &str = "\
Examples:
  # List the diffs of a package
  stillpoint patch target --debian redis
  # Fetch the program as the archive has it
  stillpoint patch target --debian redis --prebuilt --program redis-server -o redis";

/// Examples of `stillpoint migrate abort`.
pub(crate) const MIGRATE_ABORT: &str = "\
Examples:
  # Give up a migration
  stillpoint migrate abort --source \"host=db1 dbname=shop\" --target host=db2
  # Print what would be removed
  stillpoint migrate abort --source \"host=db1 dbname=shop\" --target host=db2 --dry-run";

/// Examples of `stillpoint migrate attach`.
pub(crate) const MIGRATE_ATTACH: &str = "\
Examples:
  # Redirect clients, and end idle direct sessions
  stillpoint migrate attach --source \"host=db1 dbname=shop\" --end-idle
  # Print the rules that would be set
  stillpoint migrate attach --source \"host=db1 dbname=shop\" --dry-run";

/// Examples of `stillpoint migrate check`.
pub(crate) const MIGRATE_CHECK: &str = "\
Examples:
  # Report what will become of every object
  stillpoint migrate check --source \"host=db1 dbname=shop\" --target host=db2
  # Check a source without a logical log
  stillpoint migrate check --source \"host=db1 dbname=shop\" --target host=db2 --capture rows";

/// Examples of `stillpoint migrate detach`.
pub(crate) const MIGRATE_DETACH: &str = "\
Examples:
  # Stop redirecting
  stillpoint migrate detach --source \"host=db1 dbname=shop\"
  # Stop redirecting after clients know the new server
  stillpoint migrate detach --source \"host=db1 dbname=shop\" --moved";

/// Examples of `stillpoint migrate fallback`.
pub(crate) const MIGRATE_FALLBACK: &str = "\
Examples:
  # Return to the old server
  stillpoint migrate fallback --source \"host=db1 dbname=shop\" --target host=db2
  # Return, and drop indexes and tables that were made on the new server
  stillpoint migrate fallback --source \"host=db1 dbname=shop\" --target host=db2 --drop-definitions";

/// Examples of `stillpoint migrate finish`.
pub(crate) const MIGRATE_FINISH: &str = "\
Examples:
  # Stay on the new server
  stillpoint migrate finish --source \"host=db1 dbname=shop\" --target host=db2
  # Print what would be dropped
  stillpoint migrate finish --source \"host=db1 dbname=shop\" --target host=db2 --dry-run";

/// Examples of `stillpoint migrate proxy`.
pub(crate) const MIGRATE_PROXY: &str = "\
Examples:
  # Check a configuration file
  stillpoint migrate proxy --config /etc/stillpoint/proxy.toml --check-config
  # Start a standby, which serves when the first proxy ends
  stillpoint migrate proxy --config /etc/stillpoint/proxy.toml --standby";

/// Examples of `stillpoint migrate run`.
pub(crate) const MIGRATE_RUN: &str = "\
Examples:
  # Move a database
  stillpoint migrate run --source \"host=db1 dbname=shop\" --target host=db2
  # Move it from a source without a logical log
  stillpoint migrate run --source \"host=db1 dbname=shop\" --target host=db2 --capture rows";

/// Examples of `stillpoint migrate status`.
pub(crate) const MIGRATE_STATUS: &str = "\
Examples:
  # Report the state
  stillpoint migrate status --source \"host=db1 dbname=shop\" --target host=db2
  # Report it as JSON
  stillpoint --json migrate status --source \"host=db1 dbname=shop\" --target host=db2";

/// Examples of `stillpoint kernel check`.
pub(crate) const KERNEL_CHECK: &str = "\
Examples:
  # Check whether a unit can be checkpointed
  stillpoint kernel check --unit redis-server
  # Measure a real checkpoint; the program runs on
  stillpoint kernel check --pid 4121 --rehearse --scratch /var/tmp";

/// Examples of `stillpoint kernel checkpoint`.
pub(crate) const KERNEL_CHECKPOINT: &str = "\
Examples:
  # Write a program into an image
  stillpoint kernel checkpoint --pid 4121 --image /run/stillpoint/redis
  # Write an image and let the program run on
  stillpoint kernel checkpoint --pid 4121 --image /run/stillpoint/redis --leave-running";

/// Examples of `stillpoint kernel discard`.
pub(crate) const KERNEL_DISCARD: &str = "\
Examples:
  # Remove an image
  stillpoint kernel discard --image /run/stillpoint/redis
  # Check whether it can be removed
  stillpoint kernel discard --image /run/stillpoint/redis --dry-run";

/// Examples of `stillpoint kernel dropin`.
pub(crate) const KERNEL_DROPIN: &str = "\
Examples:
  # Print the drop-in of a unit
  stillpoint kernel dropin redis-server
  # Write it to a file, for /etc/systemd/system/redis-server.service.d
  stillpoint kernel dropin redis-server >stillpoint.conf";

/// Examples of `stillpoint kernel inspect`.
pub(crate) const KERNEL_INSPECT: &str = "\
Examples:
  # Print the content of an image
  stillpoint kernel inspect /run/stillpoint/redis
  # Compare every page with its checksum
  stillpoint kernel inspect /run/stillpoint/redis --verify";

/// Examples of `stillpoint kernel memory`.
pub(crate) const KERNEL_MEMORY: &str = "\
Examples:
  # Report what is reserved
  stillpoint kernel memory
  # Reserve 4 GiB at the next boot (then run update-grub)
  stillpoint kernel memory --size 4G --write";

/// Examples of `stillpoint kernel restore`.
pub(crate) const KERNEL_RESTORE: &str = "\
Examples:
  # Restore a program
  stillpoint kernel restore --image /run/stillpoint/redis
  # Verify the image, and start nothing
  stillpoint kernel restore --image /run/stillpoint/redis --dry-run";

/// Examples of `stillpoint kernel status`.
pub(crate) const KERNEL_STATUS: &str = "\
Examples:
  # Report what is being restored, and the last switch
  stillpoint kernel status
  # Report the state of one image
  stillpoint kernel status --image /run/stillpoint/redis";

/// Examples of `stillpoint kernel switch`.
pub(crate) const KERNEL_SWITCH: &str = "\
Examples:
  # Check a switch, and change nothing
  stillpoint kernel switch --to 6.12.95+deb12-cloud-amd64 --unit redis-server --dry-run
  # Switch with all units of the configuration
  stillpoint kernel switch --to 6.12.95+deb12-cloud-amd64
  # Remove what a killed switch left
  stillpoint kernel switch --take-back";

/// Examples of `stillpoint measure check`.
pub(crate) const MEASURE_CHECK: &str = "\
Examples:
  # Check a history
  stillpoint measure check run.history
  # Check it against serializability
  stillpoint measure check --isolation serializable run.history";

/// Examples of `stillpoint measure compare`.
pub(crate) const MEASURE_COMPARE: &str = "\
Examples:
  # Compare a load during an operation with one before
  stillpoint measure compare before.rec during.rec
  # Print the ratios as JSON
  stillpoint --json measure compare before.rec during.rec";

/// Examples of `stillpoint measure http`.
pub(crate) const MEASURE_HTTP: &str = "\
Examples:
  # Request a page 100 times a second for a minute
  stillpoint measure http --addr 127.0.0.1:80 --rate 100 --duration 60
  # Request another path, and record each request
  stillpoint measure http --addr 127.0.0.1:80 --path /health --record load.rec";

/// Examples of `stillpoint measure load`.
pub(crate) const MEASURE_LOAD: &str = "\
Examples:
  # Store a million keys in a redis
  stillpoint measure load --addr 127.0.0.1:6379 --keys 1000000
  # Store keys of 1 KiB in a memcached
  stillpoint measure load --addr 127.0.0.1:11211 --protocol memcached --value-bytes 1024";

/// Examples of `stillpoint measure memcached`.
pub(crate) const MEASURE_MEMCACHED: &str = "\
Examples:
  # Send 10,000 requests a second for 10 seconds
  stillpoint measure memcached --addr 127.0.0.1:11211
  # Write more than read, and record each request
  stillpoint measure memcached --addr 127.0.0.1:11211 --mix get=30,set=70 --record load.rec";

/// Examples of `stillpoint measure postgres`.
pub(crate) const MEASURE_POSTGRES: &str = "\
Examples:
  # Run the shop for a minute
  stillpoint measure postgres --connect \"host=db1 dbname=shop\" --prepare --duration 60
  # Record a history that can be checked
  stillpoint measure postgres --connect \"host=db1 dbname=shop\" --work checked --history run.history";

/// Examples of `stillpoint measure redis`.
pub(crate) const MEASURE_REDIS: &str = "\
Examples:
  # Send 20,000 requests a second for 30 seconds, and record each
  stillpoint measure redis --addr 127.0.0.1:6379 --rate 20000 --duration 30 --record load.rec
  # Fail if a request fails or a connection is dropped
  stillpoint measure redis --socket /run/redis/redis.sock --strict";

/// Examples of `stillpoint measure report`.
pub(crate) const MEASURE_REPORT: &str = "\
Examples:
  # Show the latencies of a load
  stillpoint measure report --record load.rec
  # Show them with the steps of an operation
  stillpoint measure report --record load.rec --events events.jsonl -o report.html";

/// Examples of `stillpoint measure tcp`.
pub(crate) const MEASURE_TCP: &str = "\
Examples:
  # Send 1,000 messages a second
  stillpoint measure tcp --addr 127.0.0.1:7 --rate 1000
  # Keep 500 more connections open meanwhile
  stillpoint measure tcp --addr 127.0.0.1:7 --idle 500 --strict";

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};
    use std::path::Path;

    /// Calls `look` with the words of each command that is not hidden, groups of commands included.
    fn each(command: &Command, words: &mut Vec<String>, look: &mut impl FnMut(&[String], &Command)) {
        look(words, command);
        let shown = |below: &&Command| !below.is_hide_set() && below.get_name() != "help";
        for below in command.get_subcommands().filter(shown) {
            words.push(below.get_name().to_owned());
            each(below, words, look);
            words.pop();
        }
    }

    fn each_command(mut look: impl FnMut(&[String], &Command)) {
        each(&crate::Cli::command(), &mut Vec::new(), &mut look);
    }

    /// Example calls at the end of a command's help.
    fn examples(command: &Command) -> Vec<String> {
        let help = command.get_after_long_help().or(command.get_after_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        let (_, end) = help.rsplit_once("Examples:\n").unwrap_or_default();
        let calls = end.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with('#'));
        calls.map(str::to_owned).collect()
    }

    fn man_page(name: &str) -> Option<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../man").join(format!("{name}.1"));
        std::fs::read_to_string(path).ok().map(|text| text.replace("\\-", "-"))
    }

    #[test]
    fn each_help_ends_with_two_examples() {
        each_command(|words, command| {
            let (examples, call) = (examples(command), words.join(" "));
            let own = examples.iter().filter(|line| line.starts_with("stillpoint ") && line.contains(&call)).count();
            assert!(own >= 2, "{words:?}: {examples:?}");
        });
    }

    #[test]
    fn each_command_has_a_page_with_its_examples() {
        each_command(|words, command| {
            // The commands of a group below one command, as `patch key`, share its page.
            let name = [&["stillpoint".to_owned()][..], &words[..words.len().min(2)]].concat().join("-");
            let page = man_page(&name).unwrap_or_else(|| panic!("no page {name}"));
            assert!(page.contains("\n.SH EXAMPLES\n"), "{name}: no examples");
            for line in examples(command) {
                // Help without a terminal has 100 columns.
                assert!(line.len() <= 98, "`{line}` is too long");
                assert!(page.contains(&line), "{name} does not have `{line}`");
            }
        });
    }

    #[test]
    fn the_first_page_names_every_pillar() {
        let page = man_page("stillpoint").expect("stillpoint(1)");
        for pillar in crate::Cli::command().get_subcommands().filter(|pillar| !pillar.is_hide_set()) {
            assert!(page.contains(&format!("stillpoint {}", pillar.get_name())), "{}", pillar.get_name());
        }
    }
}
