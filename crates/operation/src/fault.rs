//! Fault injection: the one registry of points at which a test makes an operation fail.
//!
//! Each phase has three points: before its forward step, after it, and before its inverse. A part of a phase may have the first two; the
//! operation reaches these itself. No option that a user sees sets one.

use rustix::process::{Signal, getpid, kill_process};
use std::fmt;

/// Side of a phase at which a fault occurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Before the forward step: nothing of the phase has been done.
    Before,
    /// After the forward step: all of the phase has been done, and the next one has not begun.
    After,
    /// Before the inverse: the later phases have been undone, and nothing of this one.
    Inverse,
}

/// Place of a fault in the list of phases.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FaultPoint {
    /// Name of the phase, or of a part of a phase.
    pub phase: String,
    /// Side of the phase.
    pub side: Side,
}

impl FaultPoint {
    /// The point before a phase.
    pub fn before(phase: &str) -> FaultPoint {
        FaultPoint { phase: phase.into(), side: Side::Before }
    }

    /// The point after a phase.
    pub fn after(phase: &str) -> FaultPoint {
        FaultPoint { phase: phase.into(), side: Side::After }
    }

    /// The point before the inverse of a phase.
    pub fn inverse(phase: &str) -> FaultPoint {
        FaultPoint { phase: phase.into(), side: Side::Inverse }
    }
}

impl fmt::Display for FaultPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Before => "before",
            Side::After => "after",
            Side::Inverse => "before the inverse of",
        };
        write!(f, "{side} {}", self.phase)
    }
}

/// Effect of a fault.
#[derive(Debug, Clone, Copy)]
enum Effect {
    /// The phase returns an error.
    Fail,
    /// A function is called that does not return: it ends the process or the machine.
    Call(fn()),
}

/// Requested faults; empty outside of tests.
#[derive(Debug, Clone, Default)]
pub struct Faults(Vec<(FaultPoint, Effect)>);

impl Faults {
    /// No fault.
    pub fn none() -> Faults {
        Faults::default()
    }

    /// Adds a failure at a point.
    #[must_use]
    pub fn failing(mut self, point: FaultPoint) -> Faults {
        self.0.push((point, Effect::Fail));
        self
    }

    /// Adds the death of the process at a point (SIGKILL).
    #[must_use]
    pub fn killing(self, point: FaultPoint) -> Faults {
        self.calling(point, || {
            let _ = kill_process(getpid(), Signal::KILL);
        })
    }

    /// Adds a call of a function at a point: it ends the process or the machine in a way of its own.
    #[must_use]
    pub fn calling(mut self, point: FaultPoint, end: fn()) -> Faults {
        self.0.push((point, Effect::Call(end)));
        self
    }

    /// Executes the fault that is requested at a point. The driver calls it for phases; a phase calls it for its parts.
    ///
    /// # Errors
    ///
    /// The requested failure.
    pub fn reach(&self, phase: &str, side: Side) -> Result<(), Fault> {
        let Some((point, effect)) = self.0.iter().find(|(point, _)| point.phase == phase && point.side == side) else {
            return Ok(());
        };
        if let Effect::Call(end) = effect {
            end();
        }
        Err(Fault(point.clone()))
    }
}

/// Failure that a test requested.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a test made it fail {0}")]
pub struct Fault(pub FaultPoint);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_occurs_at_its_point_alone() {
        let faults = Faults::none().failing(FaultPoint::after("freeze"));
        assert_eq!(faults.reach("freeze", Side::Before), Ok(()));
        assert_eq!(faults.reach("seal", Side::After), Ok(()));
        assert_eq!(faults.reach("freeze", Side::After), Err(Fault(FaultPoint::after("freeze"))));
    }
}
