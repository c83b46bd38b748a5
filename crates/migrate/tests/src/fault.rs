//! Faults, and their moments.

use crate::Random;
use crate::stage::{Stage, Tool};
use rustix::process::Signal;
use std::time::Duration;
use stillpoint_events::{Event, EventKind};

/// An outside fault that happens once during a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None,
    /// The tool is killed at once.
    KillTool,
    /// The tool gets SIGINT, as from Ctrl-C.
    InterruptTool,
    /// The proxy is killed at once, and started again.
    KillProxy,
    /// The proxy is killed at once, and the standby serves in its place. Not among [`Fault::ALL`].
    ReplaceProxy,
    /// The source ends without a checkpoint, and is started again.
    CrashSource,
    /// The target ends without a checkpoint, and is started again.
    CrashTarget,
    /// All connections to the source end, and none can be made for a while.
    CutSource,
    /// All connections to the target end, and none can be made for a while.
    CutTarget,
    /// No byte passes to and from the source for a while.
    StallSource,
    /// No byte passes to and from the target for a while.
    StallTarget,
}

impl Fault {
    /// All faults that have an effect and need nothing else.
    pub const ALL: [Fault; 9] = [
        Fault::KillTool,
        Fault::InterruptTool,
        Fault::KillProxy,
        Fault::CrashSource,
        Fault::CrashTarget,
        Fault::CutSource,
        Fault::CutTarget,
        Fault::StallSource,
        Fault::StallTarget,
    ];

    /// Returns true if clients must notice nothing of it but a delay.
    pub fn spares_clients(self) -> bool {
        matches!(self, Fault::None | Fault::KillTool | Fault::InterruptTool)
    }

    /// Injects the fault. When this returns, all broken parts are restored.
    pub fn strike(self, stage: &mut Stage, tool: &Tool, random: &mut Random) {
        let while_broken = Duration::from_millis(50 + random.below(1500));
        match self {
            Fault::None => {}
            Fault::KillTool => tool.signal(Signal::KILL),
            Fault::InterruptTool => tool.signal(Signal::INT),
            Fault::KillProxy => {
                stage.kill_proxy();
                std::thread::sleep(while_broken / 4);
                stage.start_proxy();
            }
            Fault::ReplaceProxy => {
                let took = stage.kill_proxy_before_standby();
                println!("  another proxy serves after {took:?}");
                stage.start_standby();
            }
            Fault::CrashSource => {
                stage.source.crash();
                stage.source.restart(None);
            }
            Fault::CrashTarget => {
                stage.target.crash();
                stage.target.restart(None);
            }
            Fault::CutSource | Fault::CutTarget | Fault::StallSource | Fault::StallTarget => {
                let source = matches!(self, Fault::CutSource | Fault::StallSource);
                let network = if source { &stage.to_source } else { &stage.to_target };
                if matches!(self, Fault::CutSource | Fault::CutTarget) {
                    network.cut()
                } else {
                    network.stall()
                }
                std::thread::sleep(while_broken);
                network.restore();
            }
        }
    }
}

/// A moment of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Phase of the moment; `None` counts from the tool's start.
    pub phase: Option<&'static str>,
    /// Time after the beginning of the phase.
    pub after: Duration,
}

impl Moment {
    const THERE: [&'static str; 8] =
        ["check", "snapshot", "copy", "indexes", "catch-up", "compare", "prepare", "switch-over"];
    const BACK: [&'static str; 4] = ["catch-up", "compare", "prepare", "switch-over"];

    /// A random moment of a way there or back: half of them in the switch-over, where most is at stake.
    pub fn any(back: bool, random: &mut Random) -> Moment {
        let phases = if back { &Moment::BACK[..] } else { &Moment::THERE[..] };
        let (phase, within_us) = match random.below(4) {
            0 => (None, 4_000_000),
            1 => (Some(random.pick(phases)), 400_000),
            _ => (Some("switch-over"), 120_000),
        };
        Moment { phase, after: Duration::from_micros(random.below(within_us)) }
    }

    /// Waits for the moment; the tool may end before.
    pub fn come(self, tool: &mut Tool) {
        if let Some(wanted) = self.phase {
            tool.await_event(
                |event: &Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == wanted),
            );
        }
        std::thread::sleep(self.after);
    }
}
