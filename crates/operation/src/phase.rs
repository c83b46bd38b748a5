//! Phases, and the driver that runs a list of them.

use crate::{Fault, Faults, Side};
use std::fmt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use stillpoint_events::EventKind;

/// Future that borrows the operation.
type Pending<'o, E> = Pin<Box<dyn Future<Output = Result<(), E>> + 'o>>;

/// Work of a phase, forward or back.
pub enum Step<O: Operation> {
    /// Ends before it returns.
    Blocking(fn(&mut O) -> Result<(), O::Error>),
    /// Is awaited.
    Async(for<'o> fn(&'o mut O) -> Pending<'o, O::Error>),
}

impl<O: Operation> Step<O> {
    async fn take(&self, operation: &mut O) -> Result<(), O::Error> {
        match self {
            Step::Blocking(step) => step(operation),
            Step::Async(step) => step(operation).await,
        }
    }
}

/// Inverse of a phase.
pub enum Undo<O: Operation> {
    /// There is nothing to undo: the phase only looks or waits, or a later phase's inverse undoes it too.
    Nothing,
    /// The inverse. It is also run if the phase itself failed halfway, so it must accept any part of it.
    Inverse(Step<O>),
    /// The point of no return: once this phase has succeeded, neither it nor an earlier phase is undone.
    PointOfNoReturn,
}

/// One phase of an operation.
pub struct Phase<O: Operation> {
    /// Name, unique in its list; in events, in timings and in fault points.
    pub name: &'static str,
    /// Forward step.
    pub forward: Step<O>,
    /// Inverse of the forward step.
    pub undo: Undo<O>,
}

impl<O: Operation> Phase<O> {
    /// A phase that blocks, with its inverse.
    pub const fn new(
        name: &'static str,
        forward: fn(&mut O) -> Result<(), O::Error>,
        inverse: fn(&mut O) -> Result<(), O::Error>,
    ) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::Inverse(Step::Blocking(inverse)) }
    }

    /// A phase that blocks and has nothing to undo.
    pub const fn without_inverse(name: &'static str, forward: fn(&mut O) -> Result<(), O::Error>) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::Nothing }
    }

    /// A phase that blocks, and after which nothing is undone.
    pub const fn point_of_no_return(name: &'static str, forward: fn(&mut O) -> Result<(), O::Error>) -> Phase<O> {
        Phase { name, forward: Step::Blocking(forward), undo: Undo::PointOfNoReturn }
    }
}

/// State of an operation while its phases run.
pub trait Operation: Sized {
    /// Error of a phase.
    type Error: From<Fault> + fmt::Display;
    /// Name of the operation in events.
    const NAME: &'static str;

    /// Requested faults.
    fn faults(&self) -> &Faults;

    /// Receives one event.
    fn report(&mut self, event: EventKind);

    /// Is called before the first action of a phase: an operation with a journal records it here.
    ///
    /// # Errors
    ///
    /// The journal cannot be written; then the phase does not begin, and the phases before it are undone.
    fn begin(&mut self, _phase: &'static str) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Is called after a phase, failed or not, with its duration in nanoseconds.
    fn took(&mut self, _phase: &'static str, _duration_ns: u64) {}
}

/// Failure of an operation.
#[derive(Debug)]
pub struct Failed<E> {
    /// Phase that failed.
    pub phase: &'static str,
    /// Its error.
    pub error: E,
    /// True if the point of no return had been passed: then nothing was undone.
    pub is_final: bool,
    /// Phases whose inverse failed, with its error; the others before `phase` are undone.
    pub not_undone: Vec<(&'static str, E)>,
}

/// Runs phase after phase. On an error it runs the inverses of the phases that were begun, last first, and goes on when one of them
/// fails: as little as possible is to be left.
///
/// # Errors
///
/// The first phase that failed, and the inverses that failed.
pub async fn run<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    let Err(mut failed) = advance(operation, phases).await else { return Ok(()) };
    if !failed.is_final {
        let begun = phases.iter().take_while(|phase| phase.name != failed.phase).count() + 1;
        failed.not_undone = undo(operation, &phases[..begun]).await;
    }
    Err(failed)
}

/// Runs phase after phase, and undoes nothing: after an error the caller decides whether to call [`undo`], and with which phases.
///
/// # Errors
///
/// The first phase that failed.
pub async fn advance<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    for (at, phase) in phases.iter().enumerate() {
        let (has_acted, result) = forward(operation, phase).await;
        if let Err(error) = result {
            let passed = at + usize::from(has_acted);
            let is_final = phases[..passed].iter().any(|phase| matches!(phase.undo, Undo::PointOfNoReturn));
            return Err(Failed { phase: phase.name, error, is_final, not_undone: Vec::new() });
        }
    }
    Ok(())
}

/// Runs phases of which none is [`Step::Async`], without an executor.
///
/// # Errors
///
/// Those of [`run`].
///
/// # Panics
///
/// If a step is asynchronous and has to wait.
pub fn run_blocking<O: Operation>(operation: &mut O, phases: &[Phase<O>]) -> Result<(), Failed<O::Error>> {
    match pin!(run(operation, phases)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("operation {} has an asynchronous phase", O::NAME),
    }
}

/// Runs one phase; returns true if its forward step has succeeded, and the result with faults.
async fn forward<O: Operation>(operation: &mut O, phase: &Phase<O>) -> (bool, Result<(), O::Error>) {
    let event = |is_end: Option<u64>| {
        let (operation, phase) = (O::NAME.into(), phase.name.into());
        match is_end {
            None => EventKind::PhaseStarted { operation, phase },
            Some(duration_ns) => EventKind::PhaseEnded { operation, phase, duration_ns },
        }
    };
    operation.report(event(None));
    let begun = Instant::now();
    let mut result = operation.begin(phase.name);
    if result.is_ok() {
        result = operation.faults().reach(phase.name, Side::Before).map_err(O::Error::from);
    }
    if result.is_ok() {
        result = phase.forward.take(operation).await;
    }
    let has_acted = result.is_ok();
    if has_acted {
        result = operation.faults().reach(phase.name, Side::After).map_err(O::Error::from);
    }
    let duration_ns = begun.elapsed().as_nanos() as u64;
    operation.took(phase.name, duration_ns);
    operation.report(event(Some(duration_ns)));
    (has_acted, result)
}

/// Runs the inverses of phases, last first, and goes on when one of them fails. Returns the phases that are not undone.
pub async fn undo<O: Operation>(operation: &mut O, begun: &[Phase<O>]) -> Vec<(&'static str, O::Error)> {
    let mut not_undone = Vec::new();
    for phase in begun.iter().rev() {
        let Undo::Inverse(inverse) = &phase.undo else { continue };
        if let Err(error) = inverse.take(operation).await {
            tracing::error!(operation = O::NAME, phase = phase.name, "the phase could not be undone: {error}");
            not_undone.push((phase.name, error));
        }
    }
    not_undone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, FaultPoint};

    /// Records what is done to it.
    #[derive(Default)]
    struct Recorder {
        faults: Faults,
        done: Vec<String>,
        events: Vec<EventKind>,
        fails_to_undo: Option<&'static str>,
    }

    impl Operation for Recorder {
        type Error = Error;
        const NAME: &'static str = "record";

        fn faults(&self) -> &Faults {
            &self.faults
        }

        fn report(&mut self, event: EventKind) {
            self.events.push(event);
        }

        fn begin(&mut self, phase: &'static str) -> Result<(), Error> {
            self.done.push(format!("journal {phase}"));
            Ok(())
        }
    }

    fn inverse(recorder: &mut Recorder, name: &'static str) -> Result<(), Error> {
        recorder.done.push(format!("undo {name}"));
        match recorder.fails_to_undo {
            Some(phase) if phase == name => Err(Error::Guardian("no".into())),
            _ => Ok(()),
        }
    }

    fn forward(recorder: &mut Recorder, name: &str) -> Result<(), Error> {
        recorder.done.push(name.into());
        Ok(())
    }

    const PHASES: [Phase<Recorder>; 4] = [
        Phase::new("load", |r| forward(r, "load"), |r| inverse(r, "load")),
        Phase::without_inverse("wait", |r| forward(r, "wait")),
        Phase {
            name: "freeze",
            forward: Step::Async(|r| Box::pin(async { forward(r, "freeze") })),
            undo: Undo::Inverse(Step::Async(|r| Box::pin(async { inverse(r, "freeze") }))),
        },
        Phase::new("seal", |r| forward(r, "seal"), |r| inverse(r, "seal")),
    ];

    fn failing(point: FaultPoint) -> (Recorder, Failed<Error>) {
        let mut recorder = Recorder { faults: Faults::none().failing(point), ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        recorder.done.retain(|done| !done.starts_with("journal"));
        (recorder, failed)
    }

    #[test]
    fn phases_run_in_order_and_each_is_journaled_before_it_acts() {
        let mut recorder = Recorder::default();
        run_blocking(&mut recorder, &PHASES).unwrap_or_else(|failed| panic!("{failed:?}"));
        let both = PHASES.iter().flat_map(|phase| [format!("journal {}", phase.name), phase.name.into()]);
        assert_eq!(recorder.done, both.collect::<Vec<_>>());
        assert_eq!(recorder.events.len(), 8);
    }

    #[test]
    fn a_failure_undoes_what_was_begun_in_reverse() {
        let (recorder, failed) = failing(FaultPoint::before("freeze"));
        assert_eq!(recorder.done, ["load", "wait", "undo freeze", "undo load"]);
        assert!(matches!(&failed.error, Error::Fault(fault) if fault.0 == FaultPoint::before("freeze")), "{failed:?}");
        assert_eq!((failed.phase, failed.is_final, failed.not_undone.len()), ("freeze", false, 0));
        let (recorder, _) = failing(FaultPoint::after("seal"));
        assert_eq!(recorder.done, ["load", "wait", "freeze", "seal", "undo seal", "undo freeze", "undo load"]);
        let ends = recorder.events.iter().filter(|event| matches!(event, EventKind::PhaseEnded { .. }));
        assert_eq!(ends.count(), 4, "the phase that failed ends, too");
    }

    #[test]
    fn an_inverse_that_fails_keeps_no_other_from_being_run() {
        let faults = Faults::none().failing(FaultPoint::before("seal"));
        let mut recorder = Recorder { faults, fails_to_undo: Some("freeze"), ..Recorder::default() };
        let failed = run_blocking(&mut recorder, &PHASES).unwrap_err();
        assert_eq!(failed.not_undone.iter().map(|(phase, _)| *phase).collect::<Vec<_>>(), ["freeze"]);
        assert_eq!(recorder.done.last().map(String::as_str), Some("undo load"));
    }

    #[test]
    fn nothing_is_undone_after_the_point_of_no_return() {
        let phases = [
            Phase::<Recorder>::new("copy", |r| forward(r, "copy"), |r| inverse(r, "copy")),
            Phase::point_of_no_return("switch", |r| forward(r, "switch")),
            Phase::new("settle", |r| forward(r, "settle"), |r| inverse(r, "settle")),
        ];
        let run = |point| {
            let faults = Faults::none().failing(point);
            let mut recorder = Recorder { faults, ..Recorder::default() };
            let failed = run_blocking(&mut recorder, &phases).unwrap_err();
            (failed.is_final, recorder.done.iter().any(|done| done.starts_with("undo")))
        };
        assert_eq!(run(FaultPoint::before("settle")), (true, false));
        assert_eq!(run(FaultPoint::after("switch")), (true, false));
        assert_eq!(run(FaultPoint::before("switch")), (false, true));
    }
}
